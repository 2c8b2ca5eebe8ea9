"""Padding-free batch: all documents in ONE row without any attention mask; the borders are known only from position_ids that restart at 0, and the attention is made block-diagonal from them
(Hugging Face DataCollatorWithFlattening and its flash-attention path). The first label of each document is -100, so that no document's last token is asked for the next document's first."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "packing and positions"
KIND = "loss"
INPUTS = {"input_ids": "[1, total time], documents end to end", "position_ids": "[1, total time], restart at 0 at each document", "labels": "[1, total time], not shifted, -100 at each document's first token and where not trained"}
SETTINGS = {}
NOTES = ("Next-token CE, mean over the trained tokens of all documents (not of documents). Exactly one row. The order of the documents does not matter. The usual shift crosses the borders, where the label is -100. Positions repeat on purpose. All parameters are used.")

class LM(nn.Module):
    def __init__(self, V=29, d=16, T=16):
        super().__init__()
        self.emb = nn.Embedding(V, d); self.pos = nn.Embedding(T, d); self.l1 = nn.Linear(d, 3 * d); self.l2 = nn.Linear(d, 3 * d); self.head = nn.Linear(d, V)
    def forward(self, ids, position_ids):
        doc = (position_ids == 0).cumsum(-1)                                  # 1,1,1,2,2,3,...
        a = torch.arange(ids.shape[1], device=ids.device)
        allow = (doc[:, :, None] == doc[:, None, :]) & (a[:, None] >= a[None, :])
        x = self.emb(ids) + self.pos(position_ids)
        for l in (self.l1, self.l2):
            q, k, v = l(x).chunk(3, -1); x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=allow)
        return self.head(x)

def make(seed):
    torch.manual_seed(seed); lens, prompt = (5, 1, 9, 3), (2, 1, 4, 1)        # one document of a single token: legal, nothing to train
    ids = [torch.randint(0, 29, (n,)) for n in lens]; lab = []
    for x, p in zip(ids, prompt): y = x.clone(); y[:p] = -100; lab.append(y)  # p >= 1 always
    return {"model": LM(), "input_ids": torch.cat(ids)[None], "position_ids": torch.cat([torch.arange(n) for n in lens])[None], "labels": torch.cat(lab)[None]}

def right(model, batch):
    logits = model(batch["input_ids"], batch["position_ids"]).float()
    return F.cross_entropy(logits[0, :-1], batch["labels"][0, 1:], ignore_index=-100)

if __name__ == "__main__":
    b = make(0); m = b.pop("model"); l = right(m, b); l.backward(); g = [p.grad.clone() for p in m.parameters()]; m.zero_grad()
    st = [i for i, p in enumerate(b["position_ids"][0].tolist()) if p == 0] + [b["input_ids"].shape[1]]; s = n = 0
    for a, e in zip(st, st[1:]):                                              # every document alone
        lp = m(b["input_ids"][:, a:e], torch.arange(e - a)[None])[0].log_softmax(-1)
        for t in range(1, e - a):
            y = int(b["labels"][0, a + t])
            if y >= 0: s = s - lp[t - 1, y]; n += 1
    (s / n).backward(); err = max((x - p.grad).abs().max().item() for x, p in zip(g, m.parameters()))
    print(l.item(), (s / n).item(), "tokens", n, "gradient difference", err); assert abs(l - s / n) < 1e-5 and err < 1e-5 and min(x.norm() for x in g) > 0
