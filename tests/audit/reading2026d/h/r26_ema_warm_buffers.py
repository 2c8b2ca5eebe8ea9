"""EMA of weights whose decay grows min(0.999,(1+t)/(10+t)), with integer and running-statistics buffers COPIED, not averaged (timm, TF ExponentialMovingAverage). Tied parameters are averaged under both names alike, and t is saved with it."""
FAMILY = "moving average"; KIND = "state"
INPUTS = {"model": "net with BatchNorm", "state": "None or a saved dict t, shadow"}
SETTINGS = {"decay": "0.999"}
NOTES = "right(model, state) -> new state; call once after each optimizer step, not per micro-batch. First call copies the weights. Buffers always equal the model's. Shadow keeps the dtype of the model (float32 here)."
import torch, torch.nn as nn, copy
def make(seed):
    torch.manual_seed(seed); return {"model": nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)), "state": None}
@torch.no_grad()
def right(model, state=None, decay=0.999):
    names = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    cur = model.state_dict()
    if state is None: return {"t": 0, "shadow": {k: v.detach().clone() for k, v in cur.items()}}
    t = state["t"] + 1; d = min(decay, (1 + t) / (10 + t))
    return {"t": t, "shadow": {k: state["shadow"][k] * d + v * (1 - d) if k in names else v.clone() for k, v in cur.items()}}
if __name__ == "__main__":
    d = make(0); m = d["model"]; o = torch.optim.SGD(m.parameters(), lr=0.1); st = right(m); hist = [m[0].weight.detach().clone()]
    for i in range(12):
        o.zero_grad(); m(torch.randn(6, 4)).square().mean().backward(); o.step(); st = right(m, copy.deepcopy(st) if i == 5 else st); hist.append(m[0].weight.detach().clone())
    e = hist[0]
    for t, w in enumerate(hist[1:], 1): a = (1 + t) / (10 + t); e = e * a + w * (1 - a)
    assert torch.allclose(e, st["shadow"]["0.weight"], atol=1e-6) and st["shadow"]["1.num_batches_tracked"] == 12 and torch.equal(st["shadow"]["1.running_mean"], m[1].running_mean)
    print("t", st["t"], "distance to the model", (e - hist[-1]).norm().item())
