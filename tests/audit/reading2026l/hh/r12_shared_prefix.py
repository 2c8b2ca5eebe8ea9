"""Shared-prefix packing of a group of responses (Prefix Grouper, arXiv 2506.05433; tree training): the prompt stands once in the row, all responses follow; each
response continues the positions of the prompt and sees only the prompt and itself. The first token of each response is predicted at the last
prompt token, so several targets share one logit row and labels are no shift of the ids."""
FAMILY = "packing and positions"
KIND = "loss"
INPUTS = {"ids": "token ids [rows, time]: prompt, response 1, response 2, ..., padding", "position_ids": "[rows, time]: 0 ... P-1 in the prompt, P, P+1, ... in each response again, 0 on padding",
          "branch_ids": "[rows, time]: 0 prompt, k in response k, -1 padding", "source": "[rows, time]: index of the position whose logits predict this token; -1 for prompt tokens and padding"}
SETTINGS = {}
NOTES = """(model, batch) -> scalar: the negative log-likelihood of all response tokens, averaged over all response tokens of all rows (token mean). model(ids, position_ids, allowed) gives
logits; allowed[b, q, k] is true if k is not behind q in the row and k is in the prompt or in the same branch as q (a response sees the prompt and its own earlier tokens, never another
response); a padding query sees itself. Token t of a response is predicted by the logits at source[t]: the token before it, or for the first token of each
response the last prompt token, whose logits are used once for every response. Prompt tokens and padding are not trained. The value is the same as if each
prompt + response were a row of its own. All model parameters are used. Any number of rows."""
import torch
from torch import nn
import torch.nn.functional as F


class LM(nn.Module):
    def __init__(self, v=40, d=16, max_pos=32):
        super().__init__()
        self.emb, self.pos = nn.Embedding(v, d), nn.Embedding(max_pos, d)
        self.qkv, self.out, self.head = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, v)

    def forward(self, ids, position_ids, allowed):
        x = self.emb(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head(x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    r = lambda a, b: int(torch.randint(a, b, (1,), generator=g))
    rows = []
    for _ in range(2):
        p = r(3, 6)
        pos, br, src = list(range(p)), [0] * p, [-1] * p
        for k in range(1, 4):
            n = r(1, 6)
            at = len(pos)
            pos += range(p, p + n)
            br += [k] * n
            src += [p - 1] + list(range(at, at + n - 1))
        rows.append((pos, br, src))
    T = max(len(a[0]) for a in rows) + 1
    pad = lambda i, v: torch.tensor([a[i] + [v] * (T - len(a[i])) for a in rows])
    br = pad(1, -1)
    ids = torch.randint(1, 40, br.shape, generator=g).masked_fill(br < 0, 0)
    return {"model": LM(), "ids": ids, "position_ids": pad(0, 0), "branch_ids": br, "source": pad(2, -1)}


def right(model, batch):
    br, src, t = batch["branch_ids"], batch["source"], batch["ids"].shape[1]
    allowed = ((br[:, None, :] == 0) | (br[:, None, :] == br[:, :, None])) & torch.ones(t, t, dtype=torch.bool).tril()
    logits = model(batch["ids"], batch["position_ids"], allowed)
    trained = src >= 0
    logp = logits.log_softmax(-1)
    at_source = logp.gather(1, src.clamp(min=0)[..., None].expand(-1, -1, logp.shape[-1]))
    token_logp = at_source.gather(-1, batch["ids"][..., None])[..., 0]
    return -(token_logp * trained).sum() / trained.sum()


if __name__ == "__main__":
    x = make(0)
    m = x.pop("model")
    loss = right(m, x)
    loss.backward()
    tot = n = 0
    for b in range(2):
        br = x["branch_ids"][b]
        prompt = x["ids"][b][br == 0]
        for k in range(1, 4):
            row = torch.cat([prompt, x["ids"][b][br == k]])[None]
            L = row.shape[1]
            lp = m(row, torch.arange(L)[None], torch.ones(1, L, L, dtype=torch.bool).tril())[0].log_softmax(-1)
            for t in range(len(prompt), L):
                tot, n = tot - lp[t - 1, row[0, t]].item(), n + 1
    print("loss", loss.item(), "each response alone", tot / n, "gradients", all(p.grad.abs().sum() > 0 for p in m.parameters()))
    assert abs(loss.item() - tot / n) < 1e-5
