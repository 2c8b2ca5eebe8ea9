"""Optimizer step inside the backward (LOMO, torchtune optimizer_in_bwd, PyTorch tutorial): a post-accumulate-grad hook per parameter steps a small optimizer of its own as soon as the gradient is complete and frees it. The loop
calls neither zero_grad nor step, and after backward all gradients are None."""
import copy
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "updates (accumulation, clipping, optimizers)"
KIND = "update"
INPUTS = {"model": "a small classifier [n, 6] -> 4 classes in which one weight matrix is used twice", "optimizer": "dict parameter -> its own AdamW (one per parameter, all with the same settings)",
          "batches": "list of batches, each a dict x [rows, 6], y [rows]; one update per batch"}
SETTINGS = {}
NOTES = """One AdamW update per batch on the mean cross-entropy over the rows of that batch; no accumulation and no clipping over parameters. Each parameter's update is done by a hook that runs once per backward, after all contributions to the parameter's gradient
(also of a weight that is used several times) are added; then its gradient is released. The update of a parameter cannot change the gradients of the same backward, since each hook runs only after everything that needs the old value (through saved tensors
of its own products) has been computed for that parameter; the input gradients of the layer with that weight are computed in the same node as its weight gradient. The result equals AdamW over all parameters, stepped after each backward. All hooks are removed at the end; no gradients are left."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.mid, self.out = nn.Linear(6, 10), nn.Linear(10, 10), nn.Linear(10, 4)

    def forward(self, x):
        h = torch.tanh(self.inp(x))
        h = h + torch.tanh(self.mid(h))
        h = h + torch.tanh(self.mid(h))
        return self.out(h)


def make(seed):
    torch.manual_seed(seed)
    model = Net()
    opt = {p: torch.optim.AdamW([p], lr=0.02, weight_decay=0.1) for p in model.parameters()}
    return {"model": model, "optimizer": opt, "batches": [{"x": torch.randn(7, 6), "y": torch.randint(0, 4, (7,))} for _ in range(4)]}


def right(model, optimizer, batches):
    def hook(p):
        optimizer[p].step()
        optimizer[p].zero_grad(set_to_none=True)

    handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
    for b in batches:
        F.cross_entropy(model(b["x"]), b["y"]).backward()
    for h in handles:
        h.remove()


if __name__ == "__main__":
    i = make(0)
    ref = copy.deepcopy(i["model"])
    opt = torch.optim.AdamW(ref.parameters(), lr=0.02, weight_decay=0.1)
    for b in i["batches"]:
        opt.zero_grad(); F.cross_entropy(ref(b["x"]), b["y"]).backward(); opt.step()
    start = copy.deepcopy(i["model"].state_dict())
    right(**i)
    print("max difference to plain AdamW", max(float((a - b).detach().abs().max()) for a, b in zip(i["model"].parameters(), ref.parameters())),
          "moved", max(float((v - start[k]).abs().max()) for k, v in i["model"].state_dict().items()), "gradients left", [p.grad is None for p in i["model"].parameters()].count(False))
