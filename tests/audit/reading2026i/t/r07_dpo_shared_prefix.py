"""DPO with the prompt stored once: prompt, chosen, rejected in one row. Wang and Hegde 2024, prefix sharing for paired preference optimization.
The rejected answer has the same position ids as the chosen one, and a mask keeps the two answers from seeing each other. Positions in a row are not monotone. The last prompt token predicts the first token of BOTH answers, so one logit row is used twice."""
import torch
import torch.nn as nn
import torch.nn.functional as F
FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "prompt + chosen + rejected in one row, [rows, time]", "part": "0 prompt, 1 chosen, 2 rejected, 3 padding, [rows, time]",
          "ref_chosen": "log-probability of the chosen answer under the reference, [rows]", "ref_rejected": "same of the rejected answer, [rows]"}
SETTINGS = {"beta": "DPO beta, 0.1"}
NOTES = "Sigmoid DPO, mean over pairs; answer log-probabilities are sums over tokens. ref_* are constants. Position embeddings beyond the longest prompt+answer have no gradient. Number of rows is free."

class Att(nn.Module):
    """one attention layer; `allowed` [rows, query, key] says who may look at whom"""
    def __init__(self, vocab=31, width=16, positions=64):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(positions, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, position_ids, allowed):
        x = self.emb(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        s = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        s = s.masked_fill(~allowed, -1e9)
        return self.head(x + s.softmax(-1) @ v)

def make(seed):
    torch.manual_seed(seed)
    rows, parts = [], []
    for p, c, r in ((4, 5, 3), (3, 2, 6), (5, 4, 4)):
        ids = torch.zeros(14, dtype=torch.long); part = torch.full((14,), 3)
        ids[:p + c + r] = torch.randint(1, 31, (p + c + r,)); part[:p], part[p:p + c], part[p + c:p + c + r] = 0, 1, 2
        rows.append(ids); parts.append(part)
    return {"model": Att(), "ids": torch.stack(rows), "part": torch.stack(parts), "ref_chosen": -15 + torch.randn(3), "ref_rejected": -15 + torch.randn(3)}

def right(model, batch, beta=0.1):
    ids, part = batch["ids"], batch["part"]
    p, c = (part == 0).sum(1, keepdim=True), (part == 1).sum(1, keepdim=True)
    t = torch.arange(ids.shape[1])[None].expand_as(ids)
    pos = torch.where(part == 2, t - c, t)
    see = (part[:, None, :] == 0) | (part[:, None, :] == part[:, :, None])
    allowed = see & (t[:, None, :] <= t[:, :, None])
    lp = torch.log_softmax(model(ids, pos, allowed), -1)
    src = torch.where(t == p + c, p - 1, t - 1).clamp(min=0)        # who predicts token t
    tok = lp[torch.arange(len(ids))[:, None], src, ids]
    chosen, rejected = (tok * (part == 1)).sum(1), (tok * (part == 2)).sum(1)
    return -F.logsigmoid(beta * ((chosen - batch["ref_chosen"]) - (rejected - batch["ref_rejected"]))).mean()

if __name__ == "__main__":
    b = make(0); m = b.pop("model"); l = right(m, b); l.backward()
    def lp(ids, p):
        n = len(ids); x = torch.log_softmax(m(ids[None], torch.arange(n)[None], torch.tril(torch.ones(n, n, dtype=torch.bool))[None])[0], -1)
        return sum(x[k - 1, ids[k]] for k in range(p, n))
    ref = 0.0
    for r in range(3):
        i, q = b["ids"][r], b["part"][r]; p = int((q == 0).sum())
        d = (lp(torch.cat([i[q == 0], i[q == 1]]), p) - b["ref_chosen"][r]) - (lp(torch.cat([i[q == 0], i[q == 2]]), p) - b["ref_rejected"][r])
        ref = ref - F.logsigmoid(0.1 * d) / 3
    print("shared", l.item(), "separate", ref.item(), "grad", m.qkv.weight.grad.norm().item())
    assert torch.allclose(l, ref, atol=1e-5)
