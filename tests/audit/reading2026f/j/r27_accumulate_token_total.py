"""Accumulation with unequal micro-batches: each micro loss is a SUM divided by the number of trained tokens of ALL micro-batches, counted before the first backward; nothing is divided by the number of micro-batches (HF num_items_in_batch, the fix of the gradient accumulation bug)."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class TinyLM(nn.Module):
    """One causal attention layer; every parameter is used by the logits."""
    def __init__(self, vocab=31, width=16, max_len=64, out=None):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_len, width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, out or vocab)

    def hidden(self, ids, positions=None, mask=None):
        T = ids.shape[1]
        if positions is None:
            positions = torch.arange(T, device=ids.device).expand_as(ids)
        x = self.emb(ids) + self.pos(positions)
        ok = torch.ones(T, T, dtype=torch.bool, device=ids.device).tril()
        if mask is not None:
            ok = ok & mask
        s = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        return x + s.masked_fill(~ok, -1e9).softmax(-1) @ self.v(x)

    def forward(self, ids, positions=None, mask=None):
        return self.head(self.hidden(ids, positions, mask))

FAMILY = "updates"
KIND = "update"
INPUTS = {"batches": "list of dicts with ids and labels (-100 untrained), of different sizes"}
SETTINGS = {"max_norm": "gradient clip, 1.0, once after the last backward"}
NOTES = "One optimizer step, equal to one step on the concatenated batch. Mean over trained tokens of all micro-batches. Any number of micro-batches; one without a trained token adds nothing."


def make(seed):
    torch.manual_seed(seed)
    model, bs = TinyLM(), []
    for rows, lo in ((2, 1), (3, 7), (1, 4)):
        ids = torch.randint(0, 31, (rows, 10))
        y = ids.clone()
        y[:, :lo] = -100
        bs.append({"ids": ids, "labels": y})
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "batches": bs}


def right(model, optimizer, batches, max_norm=1.0):
    total = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
    optimizer.zero_grad(set_to_none=True)
    for b in batches:
        logits = model(b["ids"])[:, :-1].transpose(1, 2)
        (F.cross_entropy(logits, b["labels"][:, 1:], reduction="sum") / max(total, 1)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()


if __name__ == "__main__":
    d, e = make(0), make(0)
    before = [p.detach().clone() for p in d["model"].parameters()]
    right(**d)
    m = e["model"]
    ids, y = (torch.cat([b[k] for b in e["batches"]]) for k in ("ids", "labels"))
    F.cross_entropy(m(ids)[:, :-1].transpose(1, 2), y[:, 1:]).backward()
    torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    e["optimizer"].step()
    gap = max(float((a - b).detach().abs().max()) for a, b in zip(d["model"].parameters(), m.parameters()))
    moved = max(float((a - b).detach().abs().max()) for a, b in zip(d["model"].parameters(), before))
    assert gap < 1e-6 < moved
    print("ok gap", gap, "moved", moved)
