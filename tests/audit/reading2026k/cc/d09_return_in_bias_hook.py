"""One layer without balancing ends the balancing of all later layers. pytorch/torchtitan#3686, https://github.com/pytorch/torchtitan/pull/3686, 2026.
The load-balancing hook before optimizer.step walks over the MoE layers. On a layer with load_balance_coeff None it returned from the
whole hook instead of skipping that layer, so the later layers did not update expert_bias and did not clear tokens_per_expert: their
experts drift out of balance and their counters grow for ever."""
FAMILY = "moe"
KIND = "update"
INPUTS = {"model": "tiny stack of three MoE layers; layer 1 has load_balance_coeff None, layers 0 and 2 have 0.05; buffers expert_bias and tokens_per_expert",
          "optimizer": "SGD over all parameters", "batches": "list of micro-batches of one step, each a dict with x (float, [tokens, width]) and y (float, [tokens, width])"}
SETTINGS = {}
NOTES = ("One optimizer step from all micro-batches: mean squared error of each micro-batch divided by the number of micro-batches, gradients accumulated, one optimizer.step(). "
         "Before the step each layer whose load_balance_coeff is not None moves its expert_bias by coeff * sign(mean count - count), minus the mean of that move, from the tokens counted over all micro-batches, and clears its counter to 0. "
         "A layer with load_balance_coeff None keeps its bias (zero) and its counter. The bias is a buffer, only selects experts and gets no gradient. Returns None.")
import torch
import torch.nn as nn
import torch.nn.functional as F

D, E = 8, 4


class MoE(nn.Module):
    def __init__(self, coeff):
        super().__init__()
        self.load_balance_coeff = coeff
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.Parameter(torch.randn(E, D, D) * 0.3)
        self.register_buffer("expert_bias", torch.zeros(E))
        self.register_buffer("tokens_per_expert", torch.zeros(E))

    def forward(self, x):
        s = torch.sigmoid(self.gate(x))
        idx = torch.topk(s + self.expert_bias, 2, dim=-1).indices
        if self.training:
            with torch.no_grad():
                self.tokens_per_expert += F.one_hot(idx, E).sum((0, 1)).float()
        w = s.gather(-1, idx)
        w = w / w.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for e in range(E):
            y = y + (w * (idx == e)).sum(-1, keepdim=True) * torch.tanh(x @ self.experts[e])
        return x + y


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([MoE(0.05), MoE(None), MoE(0.05)])

    def forward(self, x):
        for l in self.layers:
            x = l(x)
        return x


def make(seed):
    torch.manual_seed(seed)
    model = Stack()
    batches = [{"x": torch.randn(16, D) + 0.5, "y": torch.randn(16, D)} for _ in range(3)]
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "batches": batches}


def move(layer):
    n = layer.tokens_per_expert
    delta = layer.load_balance_coeff * torch.sign(n.mean() - n)
    layer.expert_bias.add_(delta - delta.mean())
    n.zero_()


def accumulate(model, optimizer, batches):
    optimizer.zero_grad()
    for b in batches:
        (F.mse_loss(model(b["x"]), b["y"]) / len(batches)).backward()


@torch.no_grad()
def hook_broken(model):
    for layer in model.layers:
        if layer.load_balance_coeff is None:
            return
        move(layer)


@torch.no_grad()
def hook_right(model):
    for layer in model.layers:
        if layer.load_balance_coeff is None:
            continue
        move(layer)


def broken(model, optimizer, batches):
    accumulate(model, optimizer, batches)
    hook_broken(model)
    optimizer.step()


def right(model, optimizer, batches):
    accumulate(model, optimizer, batches)
    hook_right(model)
    optimizer.step()


if __name__ == "__main__":
    got = []
    for f in (broken, right):
        x = make(0)
        f(**x)
        got.append([l.expert_bias.clone() for l in x["model"].layers])
        print(f.__name__, "bias of layer 2", x["model"].layers[2].expert_bias, "counter", x["model"].layers[2].tokens_per_expert)
    assert not torch.equal(got[0][2], got[1][2])
