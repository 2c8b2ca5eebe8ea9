"""Prefix language model: tokens of the prefix attend to each other in BOTH directions, the rest is causal, and only the rest is trained (T5 prefix-LM, UniLM, UL2, PaliGemma).
A causality test finds that later prefix tokens change earlier hidden states; no trained target sees itself, so nothing leaks."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "sft and pre-training losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "prefix_len": "tokens of the bidirectional prefix (at least 1), [rows]", "length": "real tokens of the row, right padding after, [rows]"}
SETTINGS = {}
NOTES = ("Next-token cross-entropy, mean over the suffix tokens of all rows; the first trained target of a row is the first token after the prefix, predicted from the last prefix token. Prefix tokens are inputs only and are seen in both directions; "
         "a suffix token sees the whole prefix and the earlier suffix. Padding is neither seen by real tokens nor trained. prefix_len < length. All parameters are used.")

class PrefixLM(nn.Module):
    def __init__(self, V=27, d=16, T=16):
        super().__init__()
        self.emb = nn.Embedding(V, d); self.pos = nn.Parameter(0.3 * torch.randn(T, d)); self.l1 = nn.Linear(d, 3 * d); self.l2 = nn.Linear(d, 3 * d); self.head = nn.Linear(d, V)
    def forward(self, ids, prefix_len):
        B, T = ids.shape; a = torch.arange(T, device=ids.device)
        allow = (a[None, :] <= a[:, None])[None] | (a[None, None, :] < prefix_len[:, None, None])
        x = self.emb(ids) + self.pos[:T]
        for l in (self.l1, self.l2):
            q, k, v = l(x).chunk(3, -1); x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=allow)
        return self.head(x)

def make(seed):
    torch.manual_seed(seed)
    return {"model": PrefixLM(), "ids": torch.randint(0, 27, (3, 10)), "prefix_len": torch.tensor([3, 5, 1]), "length": torch.tensor([10, 8, 6])}

def right(model, batch):
    ids = batch["ids"]; T = ids.shape[1]; a = torch.arange(T, device=ids.device)[None]
    logits = model(ids, batch["prefix_len"])
    train = (a >= batch["prefix_len"][:, None]) & (a < batch["length"][:, None])
    y = ids.masked_fill(~train, -100)[:, 1:]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), y.flatten(), ignore_index=-100)

if __name__ == "__main__":
    b = make(0); m = b.pop("model"); l = right(m, b); l.backward(); s = n = 0
    for i in range(3):                                     # explicit: one row, every target from its own truncated context
        P, L = int(b["prefix_len"][i]), int(b["length"][i])
        for t in range(P, L):
            lp = m(b["ids"][i:i + 1, :t], torch.tensor([P]))[0, -1].log_softmax(-1)
            s += -lp[b["ids"][i, t]].item(); n += 1
    print(l.item(), s / n, "targets", n, "grad", sum(p.grad.norm().item() for p in m.parameters()))
    assert abs(l.item() - s / n) < 1e-5 and all(p.grad.norm() > 0 for p in m.parameters())
