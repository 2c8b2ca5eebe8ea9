"""Load-balancing loss with counts of all ranks and probabilities of one. Qwen's global-batch balance ("Demons in the
detail", arXiv 2501.11873): the fraction f of tokens per expert is reduced over ranks and is a constant (top-k has no
gradient); the mean router probability P is local. Each rank multiplies foreign counts with its own probabilities, and a
rank whose own tokens all go to one expert may still have a small loss."""
import torch
import torch.nn as nn

FAMILY = "sharding"
KIND = "loss"
INPUTS = {"ids": "token ids of all ranks, [rows, time], rows in equal blocks per rank; no padding"}
SETTINGS = {"ranks": "data-parallel ranks, 4; rows must be divisible by it", "top_k": "experts per token, 2",
            "coef": "weight, 0.01"}
NOTES = ("Auxiliary loss only: coef * E * sum over experts of f * P, f = fraction of the batch's routed slots, averaged over "
         "ranks. Equal to the loss of the whole batch in one process. Model: a router (embedding and linear), all parameters "
         "used.")


class Router(nn.Module):
    def __init__(self, vocab=40, width=16, experts=8):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.gate = nn.Linear(width, experts, bias=False)

    def forward(self, ids):
        return self.gate(self.tok(ids)).softmax(-1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    base = torch.arange(8)[:, None] // 2 * 10
    return {"model": Router(), "ids": base + torch.randint(0, 10, (8, 12), generator=g)}


def right(model, batch, ranks=4, top_k=2, coef=0.01):
    probs = [model(x).flatten(0, 1) for x in batch["ids"].chunk(ranks)]
    experts = probs[0].shape[-1]
    with torch.no_grad():
        counts = [torch.bincount(p.topk(top_k).indices.flatten(), minlength=experts).float() for p in probs]
        total = sum(counts)                                                    # all_reduce
        f = total / total.sum()
    losses = [coef * experts * (f * p.mean(0)).sum() for p in probs]
    return sum(losses) / ranks


if __name__ == "__main__":
    c = make(0)
    m = c.pop("model")
    loss = right(m, c)
    loss.backward()
    p = m(c["ids"]).flatten(0, 1)
    f = [0] * 8
    for row in p.topk(2).indices.tolist():
        for e in row:
            f[e] += 1 / (2 * len(p))
    ref = 0.01 * 8 * sum(f[e] * p[:, e].mean().item() for e in range(8))
    print("loss", loss.item(), "one process", ref, "grad", m.gate.weight.grad.norm().item())
    assert abs(loss.item() - ref) < 1e-6 and m.gate.weight.grad.norm() > 0
