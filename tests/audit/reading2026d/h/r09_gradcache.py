"""GradCache: contrastive accumulation in which the loss's gradient w.r.t. the embeddings is cached and the backward runs on a dot product.
First pass without graph for all embeddings, then the in-batch loss on the full similarity matrix, then per chunk (emb * cached grad).sum().backward() (Gao et al. 2021). The surrogate's value is meaningless and it must not be divided by the number of chunks."""
FAMILY = "update contrastive accumulation"
KIND = "update"
INPUTS = {"model": "encoder with dropout", "optimizer": "SGD", "batches": "list of chunks, dict q [rows,6], d [rows,6]; row i of q matches row i of d; all chunks are one contrastive batch"}
SETTINGS = {"tau": "temperature, 0.1"}
NOTES = "One optimizer step per call, equal to the full-batch InfoNCE step, also with dropout, since the random state of each chunk's first pass is replayed in its second. Splitting the accumulation naively would lose the negatives of other chunks. Mean over queries."
import torch, torch.nn as nn, torch.nn.functional as F, copy

class Enc(nn.Module):
    def __init__(self):
        super().__init__(); self.a = nn.Linear(6, 12); self.b = nn.Linear(12, 8); self.drop = nn.Dropout(0.2)
    def forward(self, x): return F.normalize(self.b(self.drop(torch.tanh(self.a(x)))), dim=-1)

def make(seed):
    torch.manual_seed(seed); m = Enc().double()
    return {"model": m, "optimizer": torch.optim.SGD(m.parameters(), lr=0.5),
            "batches": [{"q": torch.randn(n, 6).double(), "d": torch.randn(n, 6).double()} for n in (3, 4, 2)]}

def right(model, optimizer, batches, tau=0.1):
    optimizer.zero_grad(set_to_none=True)
    states, embs = [], []
    with torch.no_grad():
        for b in batches:
            states.append(torch.get_rng_state())
            embs.append((model(b["q"]), model(b["d"])))
    end = torch.get_rng_state()
    Q = torch.cat([e[0] for e in embs]).requires_grad_(); D = torch.cat([e[1] for e in embs]).requires_grad_()
    F.cross_entropy(Q @ D.T / tau, torch.arange(len(Q))).backward()
    sizes = [len(b["q"]) for b in batches]
    for b, s, gq, gd in zip(batches, states, Q.grad.split(sizes), D.grad.split(sizes)):
        torch.set_rng_state(s)
        q = model(b["q"]); dd = model(b["d"])
        ((q * gq).sum() + (dd * gd).sum()).backward()
    torch.set_rng_state(end)
    optimizer.step(); optimizer.zero_grad(set_to_none=True)

if __name__ == "__main__":
    d = make(0); m2 = copy.deepcopy(d["model"]); torch.manual_seed(7); right(**d)
    torch.manual_seed(7); es = [(m2(b["q"]), m2(b["d"])) for b in d["batches"]]
    Q = torch.cat([e[0] for e in es]); D = torch.cat([e[1] for e in es])
    loss = F.cross_entropy(Q @ D.T / 0.1, torch.arange(9)); loss.backward()
    err = max((p - 0.5 * p.grad - q).abs().max().item() for p, q in zip(m2.parameters(), d["model"].parameters()))
    print("loss", loss.item(), "grad", m2.a.weight.grad.norm().item(), "err", err); assert err < 1e-12
