"""GradCache (Gao et al. 2021). A contrastive loss over the whole batch with the memory of one chunk: first pass without graph, the loss's gradient with respect to the EMBEDDINGS is cached, second pass
backpropagates chunk by chunk with (embedding * cached).sum(). Every input is encoded twice and a surrogate is minimised; the gradient is exact."""
FAMILY = "update"
KIND = "update"
INPUTS = {"model": "encoder, deterministic (no dropout)", "optimizer": "its optimizer", "batches": "list of chunks {'q': [rows, 6], 'd': [rows, 6]}, row i of q belongs to row i of d; chunks may differ in size"}
SETTINGS = {"tau": "temperature of the contrastive softmax, 0.1"}
NOTES = "One optimiser step for all chunks together; negatives are ALL documents of all chunks, so it is not the average of per-chunk losses. Mean over queries. With dropout the random state would have to be restored in the second pass."
import copy
import torch
import torch.nn as nn
import torch.nn.functional as F


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "batches": [{"q": torch.randn(n, 6, generator=g), "d": torch.randn(n, 6, generator=g)} for n in (3, 4, 2)]}


def contrast(q, d, tau):
    return F.cross_entropy(F.normalize(q, dim=-1) @ F.normalize(d, dim=-1).T / tau, torch.arange(len(q)))


def right(model, optimizer, batches, tau=0.1):
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        q = torch.cat([model(b["q"]) for b in batches])
        d = torch.cat([model(b["d"]) for b in batches])
    q.requires_grad_(); d.requires_grad_()
    gq, gd = torch.autograd.grad(contrast(q, d, tau), (q, d))
    at = 0
    for b in batches:
        n = len(b["q"])
        ((model(b["q"]) * gq[at:at + n]).sum() + (model(b["d"]) * gd[at:at + n]).sum()).backward()
        at += n
    optimizer.step()


if __name__ == "__main__":
    d = make(0); twin = copy.deepcopy(d["model"]); opt = torch.optim.SGD(twin.parameters(), lr=0.1)
    before = copy.deepcopy(twin.state_dict())
    cat = lambda k: torch.cat([b[k] for b in d["batches"]])
    contrast(twin(cat("q")), twin(cat("d")), 0.1).backward(); opt.step()
    right(**d)
    for (n, a), b in zip(d["model"].named_parameters(), twin.parameters()):
        assert torch.allclose(a, b, atol=1e-6) and not torch.equal(a, before[n]), n
    print("ok")
