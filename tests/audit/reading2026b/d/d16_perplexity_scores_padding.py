"""Perplexity of a batch of references scores the padding of the shorter ones.
axolotl-ai-cloud/axolotl#3988, https://github.com/axolotl-ai-cloud/axolotl/pull/3988, 2026 (September).
References of unequal length are tokenised with padding, but labels are a plain copy of the ids and
no attention mask is passed. The loss of predicting padding enters the reported number."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'metrics'
KIND = 'metric over ranks'
INPUTS = {
    'parts': 'list of per-rank dicts: model (the same on each rank), ids [rows, time] right-padded with 0, attention_mask [rows, time]',
}
SETTINGS = {}
NOTES = (
    'Perplexity of the reference texts: exp of the summed next-token loss of real tokens over their '
    'number, over all ranks. single(...) scores each text alone without padding. '
)


class Tiny(nn.Module):
    """Embedding + learned positions, one causal self-attention layer, MLP, head."""
    def __init__(self, vocab=20, width=16, heads=2, length=64):
        super().__init__()
        self.heads = heads
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def hidden(self, ids, positions=None, allowed=None):
        b, t = ids.shape
        if positions is None:
            positions = torch.arange(t).expand(b, t)
        ok = torch.ones(t, t, dtype=torch.bool).tril().expand(b, t, t)
        if allowed is not None:               # [b, t, t] bool, replaces the causal mask
            ok = allowed
        x = self.emb(ids) + self.pos(positions)
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        s = s.masked_fill(~ok[:, None], float("-inf"))
        x = x + self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))
        return self.norm(x + self.down(F.gelu(self.up(x))))

    def forward(self, ids, positions=None, allowed=None):
        return self.head(self.hidden(ids, positions, allowed))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Tiny()
    parts = []
    for _ in range(2):
        lengths = torch.randint(4, 13, (3,), generator=g)
        lengths[0] = 12
        mask = (torch.arange(12)[None] < lengths[:, None]).long()
        ids = torch.randint(1, 20, (3, 12), generator=g) * mask
        parts.append({"model": model, "ids": ids, "attention_mask": mask})
    return {"parts": parts}


@torch.no_grad()
def _sums(part, labels, allowed):
    logits = part["model"](part["ids"], None, allowed)[:, :-1]
    nll = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
    return float(nll), int((labels[:, 1:] != -100).sum())


def broken(parts):
    total, count = 0.0, 0
    for p in parts:
        labels = p["ids"].clone()
        s, n = _sums(p, labels, None)
        total, count = total + s, count + n
    return math.exp(total / count)


def right(parts):
    total, count = 0.0, 0
    for p in parts:
        mask = p["attention_mask"].bool()
        labels = p["ids"].masked_fill(~mask, -100)
        t = mask.shape[1]
        allowed = (mask[:, None, :] & torch.ones(t, t, dtype=torch.bool).tril()) | torch.eye(t, dtype=torch.bool)
        s, n = _sums(p, labels, allowed)
        total, count = total + s, count + n
    return math.exp(total / count)


@torch.no_grad()
def single(parts):
    nll = []
    for p in parts:
        for ids, mask in zip(p["ids"], p["attention_mask"]):
            text = ids[mask.bool()][None]
            nll.append(F.cross_entropy(p["model"](text)[0, :-1], text[0, 1:], reduction="none"))
    return math.exp(float(torch.cat(nll).mean()))


if __name__ == "__main__":
    d = make(0)
    print("broken", broken(**d), "right", right(**d), "text by text", single(**d))
    assert abs(right(**d) - single(**d)) < 1e-3
    assert abs(broken(**d) - right(**d)) > 1e-2
