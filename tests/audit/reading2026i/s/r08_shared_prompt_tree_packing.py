"""Shared-prompt packing for group sampling (Prefix Grouper; tree training in AReaL): the prompt stands once in the row, followed by all responses. Each response's positions restart at the prompt length, it sees the prompt and itself only, and
the logit for the first token of EVERY response comes from the last prompt token, not from the place before it. So one place is used for several targets, and the last token of a response is used for none."""
import torch
from torch import nn

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "one row: prompt, then the responses, [time]", "segment": "0 = prompt, k = response k, [time]", "advantage": "advantage of each response, [responses] (constant)"}
SETTINGS = {}
NOTES = "REINFORCE: minus the advantage times the log-probability, mean over response tokens of the row (each token the same weight). Needs at least one prompt token and one token in each response. All parameters are used."


class Attn(nn.Module):
    def __init__(self, vocab=40, width=16, longest=24):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(longest, width)
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(width, vocab)

    def forward(self, ids, pos, allowed):
        x = self.emb(ids) + self.pos(pos)
        q, k, v = self.qkv(x).chunk(3, -1)
        s = (q @ k.T / q.shape[-1] ** 0.5).masked_fill(~allowed, -1e9)
        return self.head(x + s.softmax(-1) @ v)


def make(seed):
    torch.manual_seed(seed)
    segment = torch.tensor([0] * 5 + [1] * 4 + [2] * 6 + [3] * 3)
    return {"model": Attn(longest=11), "ids": torch.randint(0, 40, (18,)), "segment": segment, "advantage": torch.tensor([1.0, -0.5, 0.3])}


def right(model, batch):
    ids, seg = batch["ids"], batch["segment"]
    n, prompt = len(ids), int((seg == 0).sum())
    index = torch.arange(n)
    start = torch.stack([index[seg == s].min() for s in range(int(seg.max()) + 1)])[seg]
    pos = torch.where(seg == 0, index, prompt + index - start)
    allowed = ((seg[:, None] == seg[None, :]) | (seg[None, :] == 0)) & (index[:, None] >= index[None, :])
    lp = model(ids, pos, allowed).log_softmax(-1)
    target = index[seg > 0]
    source = torch.where(target == start[target], torch.full_like(target, prompt - 1), target - 1)
    token_lp = lp[source, ids[target]]
    return -(batch["advantage"][seg[target] - 1] * token_lp).mean()


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss = right(model, d)
    loss.backward()
    terms, prompt = [], d["ids"][d["segment"] == 0]
    for k in (1, 2, 3):
        row = torch.cat([prompt, d["ids"][d["segment"] == k]])
        n = len(row)
        lp = model(row, torch.arange(n), torch.ones(n, n, dtype=torch.bool).tril()).log_softmax(-1)
        terms += [-d["advantage"][k - 1] * lp[t - 1, row[t]] for t in range(len(prompt), n)]
    want = torch.stack(terms).mean()
    print("tree", loss.item(), "separate rows", want.item())
    assert abs(loss.item() - want.item()) < 1e-5 and all(p.grad.abs().sum() > 0 for p in model.parameters())
