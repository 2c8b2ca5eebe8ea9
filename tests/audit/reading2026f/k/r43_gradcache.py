"""GradCache (Gao et al. 2021). A contrastive loss over a large batch cannot be accumulated by adding micro-batch losses. Here: embeddings without graph, loss on the
leaf copies, then a second forward whose 'loss' is the dot product with the cached gradients. The model runs twice; the surrogate's value means nothing."""
import copy
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "updates with accumulation"
KIND = "update"
INPUTS = {"model": "an encoder without dropout", "optimizer": "any torch optimizer", "batches": "list of micro-batches, each {query, key}: token ids [rows, time]; row i of key is the positive of row i of query"}
SETTINGS = {"temperature": "0.1"}
NOTES = "One optimizer step whose gradient equals that of InfoNCE over the union of the micro-batches (mean over all queries; all other keys are negatives). Nothing is divided by the number of micro-batches. The model must be deterministic (or replay its random state)."


class Encoder(nn.Module):
    def __init__(self, vocab=30, width=16):
        super().__init__()
        self.emb, self.out = nn.Embedding(vocab, width), nn.Linear(width, 8)

    def forward(self, ids):
        return F.normalize(self.out(torch.tanh(self.emb(ids)).mean(1)), dim=-1)


def make(seed):
    torch.manual_seed(seed); g = torch.Generator().manual_seed(seed)
    model = Encoder()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
            "batches": [{k: torch.randint(0, 30, (n, 5), generator=g) for k in ("query", "key")} for n in (3, 4, 2)]}


def info_nce(q, k, temperature):
    return F.cross_entropy(q @ k.T / temperature, torch.arange(len(q)))


def right(model, optimizer, batches, temperature=0.1):
    optimizer.zero_grad()
    with torch.no_grad():
        reps = {side: torch.cat([model(b[side]) for b in batches]) for side in ("query", "key")}
    reps = {side: r.requires_grad_() for side, r in reps.items()}
    info_nce(reps["query"], reps["key"], temperature).backward()
    start = 0
    for b in batches:
        n = len(b["query"])
        for side in ("query", "key"):
            (model(b[side]) * reps[side].grad[start:start + n]).sum().backward()
        start += n
    optimizer.step()


if __name__ == "__main__":
    d = make(0); big = copy.deepcopy(d["model"]); before = copy.deepcopy(big)
    right(**d)
    cat = lambda s: torch.cat([b[s] for b in d["batches"]])
    opt = torch.optim.SGD(big.parameters(), lr=0.5)
    info_nce(big(cat("query")), big(cat("key")), 0.1).backward(); opt.step()
    diff = max((a - b).abs().max().item() for a, b in zip(d["model"].parameters(), big.parameters()))
    moved = max((a - b).abs().max().item() for a, b in zip(d["model"].parameters(), before.parameters()))
    print("difference to the big batch", diff, "moved by", moved); assert diff < 1e-5 < moved
