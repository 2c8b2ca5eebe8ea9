"""GradCache: embeddings are made without graph, the contrastive loss over the full batch gives a gradient for each embedding, and a second forward per chunk back-propagates the surrogate (embedding * cached gradient).sum(). The surrogate's value is meaningless, its gradient is exact, with all rows as in-batch negatives (Gao et al. 2021; sentence-transformers Cached losses)."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "updates"
KIND = "update"
INPUTS = {"batches": "list of chunks, each a dict of queries and keys, [rows, 6]; row i of queries fits row i of keys"}
SETTINGS = {"temperature": "0.1"}
NOTES = "One step, equal to InfoNCE over the concatenation of the chunks: mean over all queries. No dropout (else random state must be replayed). Not a sum over chunks: negatives cross chunks. Any chunk sizes. All parameters used."


def make(seed):
    torch.manual_seed(seed)
    m = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
    return {"model": m, "optimizer": torch.optim.SGD(m.parameters(), lr=0.05), "batches": [{"queries": torch.randn(n, 6), "keys": torch.randn(n, 6)} for n in (3, 2, 4)]}


def info_nce(q, k, temperature):
    return F.cross_entropy(F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).T / temperature, torch.arange(len(q)))


def right(model, optimizer, batches, temperature=0.1):
    optimizer.zero_grad()
    with torch.no_grad():
        q = torch.cat([model(b["queries"]) for b in batches])
        k = torch.cat([model(b["keys"]) for b in batches])
    q.requires_grad_(), k.requires_grad_()
    gq, gk = torch.autograd.grad(info_nce(q, k, temperature), (q, k))
    at = 0
    for b in batches:
        n = len(b["queries"])
        surrogate = (model(b["queries"]) * gq[at:at + n]).sum() + (model(b["keys"]) * gk[at:at + n]).sum()
        surrogate.backward()
        at += n
    optimizer.step()


if __name__ == "__main__":
    d, e = make(0), make(0)
    right(**d)
    m = e["model"]
    q, k = (torch.cat([b[n] for b in e["batches"]]) for n in ("queries", "keys"))
    info_nce(m(q), m(k), 0.1).backward()
    gap = max(float((a.grad - b.grad).abs().max()) for a, b in zip(d["model"].parameters(), m.parameters()))
    e["optimizer"].step()
    same = max(float((a - b).detach().abs().max()) for a, b in zip(d["model"].parameters(), m.parameters()))
    assert gap < 1e-5 and same < 1e-5 and float(m[0].weight.grad.norm()) > 0
    print("ok", gap, same)
