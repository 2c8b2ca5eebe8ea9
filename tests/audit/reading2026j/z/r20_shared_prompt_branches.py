"""Several completions of one prompt in one row, the prompt stored once (prefix sharing / tree attention): each completion sees the prompt and itself, and its position ids start again at the prompt's length, so positions repeat and fall.
The first token of EVERY completion is predicted from the last prompt token; the plain shift by one would take the wrong predecessor for all but the first."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "packing and positions"
KIND = "loss"
INPUTS = {"ids": "[rows, time]: prompt, then completion 1, completion 2, …, then padding", "branch": "[rows, time]: 0 = prompt, 1.. = completion, -1 = padding", "pos": "[rows, time]: position within prompt + own completion; 0 for padding"}
SETTINGS = {}
NOTES = ("SFT cross-entropy on all completion tokens, mean over the completion tokens of all rows; prompt tokens are not trained. The predecessor of a token is found by index: the previous token of the same branch, or the last prompt token for the first of a branch. "
         "Branches are contiguous and the prompt has at least one token. The gradient through the prompt is the sum over its completions. All parameters are used.")

class LM(nn.Module):
    def __init__(self, V=31, d=16, T=16):
        super().__init__()
        self.emb = nn.Embedding(V, d); self.pos = nn.Embedding(T, d); self.l1 = nn.Linear(d, 3 * d); self.l2 = nn.Linear(d, 3 * d); self.head = nn.Linear(d, V)
    def forward(self, ids, pos, branch):
        a = torch.arange(ids.shape[1], device=ids.device); same = branch[:, :, None] == branch[:, None, :]
        allow = (same | (branch[:, None, :] == 0)) & (a[:, None] >= a[None, :])          # padding only sees padding and the prompt; nobody sees padding
        x = self.emb(ids) + self.pos(pos)
        for l in (self.l1, self.l2):
            q, k, v = l(x).chunk(3, -1); x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=allow)
        return self.head(x)

def make(seed):
    torch.manual_seed(seed); rows = [(4, (3, 5, 1)), (2, (4, 4)), (6, (2,))]; T = 13
    ids = torch.zeros(3, T, dtype=torch.long); br = torch.full((3, T), -1); pos = torch.zeros(3, T, dtype=torch.long)
    for i, (P, cs) in enumerate(rows):
        b = [0] * P; p = list(range(P))
        for j, c in enumerate(cs, 1): b += [j] * c; p += range(P, P + c)
        ids[i, :len(b)] = torch.randint(1, 31, (len(b),)); br[i, :len(b)] = torch.tensor(b); pos[i, :len(b)] = torch.tensor(p)
    return {"model": LM(), "ids": ids, "branch": br, "pos": pos}

def right(model, batch):
    ids, br = batch["ids"], batch["branch"]
    logits = model(ids, batch["pos"], br).float()
    a = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    first = br != torch.roll(br, 1, 1)                                    # start of a branch
    last_prompt = (br == 0).sum(1, keepdim=True) - 1
    prev = torch.where(first, last_prompt.expand_as(a), a - 1)
    t = br > 0
    r = torch.arange(len(ids), device=ids.device)[:, None].expand_as(a)
    return F.cross_entropy(logits[r[t], prev[t]], ids[t])

if __name__ == "__main__":
    b = make(0); m = b.pop("model"); l = right(m, b); l.backward(); g = [p.grad.clone() for p in m.parameters()]; m.zero_grad(); s = n = 0
    for i in range(3):
        P = b["ids"][i][b["branch"][i] == 0]
        for j in range(1, int(b["branch"][i].max()) + 1):                # explicit: prompt + one completion as an own row
            C = b["ids"][i][b["branch"][i] == j]; x = torch.cat([P, C])[None]; L = x.shape[1]
            lp = m(x, torch.arange(L)[None], torch.zeros(1, L))[0].log_softmax(-1)
            for t in range(len(P), L): s = s - lp[t - 1, x[0, t]]; n += 1
    (s / n).backward(); err = max((x - p.grad).abs().max().item() for x, p in zip(g, m.parameters()))
    print(l.item(), (s / n).item(), "tokens", n, "gradient difference", err); assert abs(l - s / n) < 1e-5 and err < 1e-5 and min(x.norm() for x in g) > 0
