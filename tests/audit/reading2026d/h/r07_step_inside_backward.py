"""Optimizer step fused into the backward pass: no call of step(), gradients are None afterwards.
A post-accumulate-grad hook steps each parameter's own optimizer and frees its gradient at once (LOMO, torch tutorial optimizer_step_in_backward, torchtune). Right because a hook fires once all uses of the parameter have been accumulated, also for tied weights."""
FAMILY = "update fused"
KIND = "update"
INPUTS = {"model": "language model with tied embedding and head", "optimizer": "dict parameter -> its own Adam", "batches": "list of dict ids [rows,time]; one step each"}
SETTINGS = {}
NOTES = "One step per batch, no accumulation and no global clip (both impossible here). Mean over predicted tokens. The hooks are removed at the end. Equal to ordinary Adam."
import torch, torch.nn as nn, torch.nn.functional as F, copy

class Tied(nn.Module):
    def __init__(self):
        super().__init__(); self.emb = nn.Embedding(20, 12); self.gru = nn.GRU(12, 12, batch_first=True)
    def forward(self, ids): return self.gru(self.emb(ids))[0] @ self.emb.weight.T

def loss_of(model, b):
    return F.cross_entropy(model(b["ids"][:, :-1]).flatten(0, 1), b["ids"][:, 1:].flatten())

def make(seed):
    torch.manual_seed(seed); m = Tied().double()
    return {"model": m, "optimizer": {p: torch.optim.Adam([p], lr=0.01) for p in m.parameters()},
            "batches": [{"ids": torch.randint(0, 20, (3, 7))} for _ in range(4)]}

def right(model, optimizer, batches):
    def hook(p):
        optimizer[p].step()
        optimizer[p].zero_grad(set_to_none=True)
    handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
    try:
        for b in batches:
            loss_of(model, b).backward()
    finally:
        for h in handles: h.remove()

if __name__ == "__main__":
    d = make(0); m2 = copy.deepcopy(d["model"]); o = torch.optim.Adam(m2.parameters(), lr=0.01)
    right(**d)
    for b in d["batches"]:
        o.zero_grad(); loss_of(m2, b).backward(); o.step()
    err = max((a - b).abs().max().item() for a, b in zip(d["model"].parameters(), m2.parameters()))
    print("err", err, "grads", [p.grad for p in d["model"].parameters()][:2]); assert err < 1e-12 and all(p.grad is None for p in d["model"].parameters())
