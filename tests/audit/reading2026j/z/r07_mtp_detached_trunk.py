"""Multi-token prediction with one backward per head on a DETACHED trunk output (Gloeckle et al. 2024, figure 'order of forward/backward'): the heads' gradients gather in d.grad and
one trunk.backward(d.grad) then sends the sum through the trunk. It looks as if the trunk were cut off from the loss; the gradient is exactly that of the sum of the heads' losses."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "sft and pre-training losses"
KIND = "update"
INPUTS = {"model": "trunk(ids) -> [rows, time, d], heads[k](x) -> [rows, time, d], shared unembed", "optimizer": "AdamW over all parameters", "batches": "list of dicts with ids [rows, time]; one optimizer step each"}
SETTINGS = {}
NOTES = ("Loss = sum over the n heads of the mean over valid tokens of CE of token t+1+k given t; head k has time-1-k targets per row. Not divided by n. One optimizer step per batch, no accumulation. "
         "Time must exceed the number of heads. All parameters are used.")

class MTP(nn.Module):
    def __init__(self, V=21, d=16, n=3):
        super().__init__()
        self.emb = nn.Embedding(V, d); self.rnn = nn.GRU(d, d, batch_first=True)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.Tanh()) for _ in range(n)); self.unembed = nn.Linear(d, V, bias=False)
    def trunk(self, ids): return self.rnn(self.emb(ids))[0]
    def forward(self, ids):
        z = self.trunk(ids); return [self.unembed(z + h(z)) for h in self.heads]

def make(seed):
    torch.manual_seed(seed); m = MTP()
    return {"model": m, "optimizer": torch.optim.AdamW(m.parameters(), lr=1e-2), "batches": [{"ids": torch.randint(0, 21, (3, 9))} for _ in range(2)]}

def gradients(model, ids):
    z = model.trunk(ids)
    d = z.detach().requires_grad_(True)
    total = 0.0
    for k, head in enumerate(model.heads):
        x = d[:, : ids.shape[1] - 1 - k]
        loss = F.cross_entropy(model.unembed(x + head(x)).flatten(0, 1), ids[:, 1 + k:].flatten())
        loss.backward()                                  # frees this head's logits; adds into d.grad
        total += loss.item()
    z.backward(gradient=d.grad)
    return total

def right(model, optimizer, batches):
    for b in batches:
        optimizer.zero_grad(set_to_none=True)
        gradients(model, b["ids"])
        optimizer.step()

if __name__ == "__main__":
    import copy
    D = make(0); m = D["model"]; twin = copy.deepcopy(m); ids = D["batches"][0]["ids"]
    tot = gradients(m, ids); ref = 0
    for k, lg in enumerate(twin(ids)):
        lp = lg.log_softmax(-1)
        ref = ref + torch.stack([-lp[i, t, ids[i, t + 1 + k]] for i in range(3) for t in range(9 - 1 - k)]).mean()
    ref.backward()
    err = max((a.grad - b.grad).abs().max().item() for a, b in zip(m.parameters(), twin.parameters()))
    m.zero_grad(); before = [p.detach().clone() for p in m.parameters()]
    right(m, D["optimizer"], D["batches"])
    print(tot, ref.item(), "gradient difference", err, "trunk grad", twin.emb.weight.grad.norm().item())
    assert err < 1e-6 and abs(tot - ref.item()) < 1e-5 and all((a - b).abs().max() > 0 for a, b in zip(before, m.parameters()))
