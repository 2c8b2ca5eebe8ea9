"""Optimizer step fused into backward (LOMO, arXiv:2306.09782; torchtune optimizer_in_bwd; PyTorch tutorial): one optimizer per parameter, run by a post-accumulate hook that frees the gradient. The training loop has neither step() nor zero_grad(), and weights change while backward still runs."""
import torch
from torch import nn

FAMILY = "updates"
KIND = "update"
INPUTS = {"model": "network x [n, 4] -> [n, 1]", "optimizer": "a template whose defaults (SGD, lr 0.1, momentum 0.9) are used for every parameter; its own step() is not called", "batches": "list of dicts x [n, 4], y [n, 1]; one update per batch"}
SETTINGS = {}
NOTES = ("One SGD-with-momentum update of every parameter per batch on the mean squared error over rows. Each parameter has its own optimizer, which is run by a hook as soon as the gradient of this parameter is complete, and then the gradient is dropped. "
         "Every parameter is used exactly once in the graph and its saved value is needed no more when its gradient is ready, so the result is identical to one ordinary optimizer stepped after backward. No accumulation over batches and no global clipping (impossible in this form).")


def make(seed):
    torch.manual_seed(seed)
    m = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return {"model": m, "optimizer": torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), "batches": [{"x": torch.randn(6, 4), "y": torch.randn(6, 1)} for _ in range(5)]}


def right(model, optimizer, batches):
    d = optimizer.defaults
    per = {p: torch.optim.SGD([p], lr=d["lr"], momentum=d["momentum"]) for p in model.parameters()}

    def hook(p):
        per[p].step()
        per[p].zero_grad()
    handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
    for b in batches:
        ((model(b["x"]) - b["y"]) ** 2).mean().backward()
    for h in handles:
        h.remove()


if __name__ == "__main__":
    i, j = make(0), make(0)
    right(**i)
    for b in j["batches"]:
        j["optimizer"].zero_grad(); ((j["model"](b["x"]) - b["y"]) ** 2).mean().backward(); j["optimizer"].step()
    k = make(0)["model"]
    print("error", max((p - q).abs().max().item() for p, q in zip(i["model"].parameters(), j["model"].parameters())), "moved", (i["model"][0].weight - k[0].weight).norm().item())
