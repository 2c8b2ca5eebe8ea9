"""Expert-choice routing (Zhou et al. 2022, arXiv 2202.09368): experts choose tokens, not tokens experts. Softmax over experts, top-k over tokens; a token may get no expert or many, and no balancing loss is needed."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "mixture of experts"
KIND = "loss"
INPUTS = {"ids": "token ids with some replaced by the mask token 0, [rows, time], no padding", "labels": "true token where it was masked, -100 elsewhere, [rows, time]"}
SETTINGS = {"capacity": "mean number of experts per token, 2"}
NOTES = ("Masked-language-model loss of an encoder (not causal, no shift): mean cross entropy over the masked positions of all rows. The MoE layer routes by expert choice over all n = rows*time tokens of the batch: scores = softmax over the experts for each token; then every expert takes the k = n*capacity/experts tokens with its highest scores. "
         "The output of a token is the sum over the experts that took it of score * expert(token), with the score not renormalised; a token that no expert took gets zero from the layer and keeps the residual. So tokens of different rows compete, by design; loads are equal by construction and there is no balancing loss. All parameters are used.")

class Enc(nn.Module):
    def __init__(self, vocab=23, width=16, experts=4, T=8):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Parameter(torch.randn(T, width))
        self.att = nn.MultiheadAttention(width, 2, batch_first=True)
        self.router = nn.Linear(width, experts, bias=False)
        self.w1, self.w2 = nn.Parameter(torch.randn(experts, width, 24) / 4), nn.Parameter(torch.randn(experts, 24, width) / 5)
        self.head = nn.Linear(width, vocab)
    def trunk(self, ids):
        h = self.emb(ids) + self.pos[: ids.shape[1]]
        return h + self.att(h, h, h, need_weights=False)[0]

def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(1, 23, (4, 8)); m = torch.rand(4, 8) < 0.3; m[:, 0] = True
    return {"ids": ids.masked_fill(m, 0), "labels": torch.where(m, ids, -100), "model": Enc()}

def right(model, batch, capacity=2):
    h = model.trunk(batch["ids"])
    x = h.flatten(0, 1)
    n, E = len(x), model.w1.shape[0]
    scores = model.router(x).softmax(-1)                       # over experts
    G, I = scores.T.topk(n * capacity // E, dim=-1)            # over tokens
    y = torch.einsum("ekf,efd->ekd", torch.relu(torch.einsum("ekd,edf->ekf", x[I], model.w1)), model.w2)
    out = torch.zeros_like(x).index_add(0, I.flatten(), (G[..., None] * y).flatten(0, 1))
    return F.cross_entropy(model.head(x + out), batch["labels"].flatten(), ignore_index=-100)

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); l = right(m, d); l.backward()
    x = m.trunk(d["ids"]).flatten(0, 1); s = m.router(x).softmax(-1); out = [v.clone() for v in x]; got = [0] * 32
    for e in range(4):
        for i in sorted(range(32), key=lambda j: -s[j, e].item())[:16]:
            out[i] = out[i] + s[i, e] * (torch.relu(x[i] @ m.w1[e]) @ m.w2[e]); got[i] += 1
    ref = [F.cross_entropy(m.head(out[i]), y).item() for i, y in enumerate(d["labels"].flatten()) if y != -100]
    print(l.item(), sum(ref) / len(ref), "experts per token", sorted(got), "no grad", [n for n, p in m.named_parameters() if p.grad is None]); assert abs(l.item() - sum(ref) / len(ref)) < 1e-4
