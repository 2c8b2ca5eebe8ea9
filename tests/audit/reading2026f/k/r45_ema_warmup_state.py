"""EMA of weights with a warmed-up decay (TensorFlow ExponentialMovingAverage num_updates; timm, diffusers). decay_n = min(decay, (1 + n) / (10 + n)): the first averages nearly copy the
model. Shadows are fp32 though the model is bf16, buffers are copied and not averaged, and n is part of the saved state."""
import copy
import torch, torch.nn as nn

FAMILY = "moving averages"
KIND = "state"
INPUTS = {"model": "module in bf16 with a BatchNorm (float and integer buffers)"}
SETTINGS = {"decay": "largest decay, 0.99"}
NOTES = "right(model) makes the averager; update(model) after each optimizer step. state_dict/load_state_dict hold shadows, buffers and n, so that resuming goes on exactly. Parameters only are averaged; buffers follow the model."


def make(seed):
    torch.manual_seed(seed)
    return {"model": nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).to(torch.bfloat16)}


class right:
    def __init__(self, model, decay=0.99):
        self.decay, self.n = decay, 0
        self.shadow = {k: p.detach().float().clone() for k, p in model.named_parameters()}
        self.buffers = {k: b.detach().clone() for k, b in model.named_buffers()}

    @torch.no_grad()
    def update(self, model):
        self.n += 1
        d = min(self.decay, (1 + self.n) / (10 + self.n))
        for k, p in model.named_parameters():
            self.shadow[k].lerp_(p.float(), 1 - d)
        for k, b in model.named_buffers():
            self.buffers[k].copy_(b)

    @torch.no_grad()
    def copy_to(self, model):
        for k, p in model.named_parameters():
            p.copy_(self.shadow[k])
        for k, b in model.named_buffers():
            b.copy_(self.buffers[k])

    def state_dict(self):
        return {"n": self.n, "shadow": {k: v.clone() for k, v in self.shadow.items()}, "buffers": {k: v.clone() for k, v in self.buffers.items()}}

    def load_state_dict(self, state):
        self.n = state["n"]
        self.shadow = {k: v.clone() for k, v in state["shadow"].items()}
        self.buffers = {k: v.clone() for k, v in state["buffers"].items()}


if __name__ == "__main__":
    m = make(0)["model"]; e = right(m); history, resumed = [], None
    start = m[0].weight.detach().double().clone()
    for step in range(30):
        with torch.no_grad():
            for p in m.parameters():
                p.add_(torch.randn(p.shape).to(p.dtype) * 0.1)
        m(torch.randn(8, 4).to(torch.bfloat16))
        e.update(m); history.append(m[0].weight.detach().double().clone())
        if resumed:
            resumed.update(m)
        if step == 11:
            resumed = right(copy.deepcopy(m)); resumed.load_state_dict(copy.deepcopy(e.state_dict()))
    slow = start
    for n, w in enumerate(history, 1):
        d = min(0.99, (1 + n) / (10 + n)); slow = d * slow + (1 - d) * w
    print("difference to the loop", (e.shadow["0.weight"] - slow).abs().max().item(), "n", e.n, "batches tracked", e.buffers["1.num_batches_tracked"].item())
    assert (e.shadow["0.weight"] - slow).abs().max() < 1e-5 and all(torch.equal(e.shadow[k], resumed.shadow[k]) for k in e.shadow)
    assert e.buffers["1.num_batches_tracked"] == 30; e.copy_to(m); assert m[0].weight.dtype == torch.bfloat16
