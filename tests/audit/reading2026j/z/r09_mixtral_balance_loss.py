"""Mixture-of-experts balance loss as in Hugging Face Mixtral: E * sum_e f_e * P_e over all layers' tokens together, f_e the share of tokens sent to expert e SUMMED over the top-k slots
(so a perfect balance gives k, not 1), padding left out. f comes from top-k and has no gradient; only the mean router probability P carries it (Switch Transformer, Fedus et al. 2021)."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "auxiliary losses and regularisers"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "attention_mask": "1 for real tokens, right padding, [rows, time]"}
SETTINGS = {"coef": "weight of the balance loss, 0.02", "top_k": "experts per token, 2 (the model's own value)"}
NOTES = ("Next-token CE, mean over real targets of all rows, plus coef * balance. f_e is a constant (argmax-like). The balance term is a product of two batch means: it is not a mean over rows, so halves of a batch do not average to the whole. "
         "Layers are concatenated before the means, as HF does. The balance term is k = 2 at perfect balance, not 0 or 1. All parameters are used.")

class MoE(nn.Module):
    def __init__(self, V=23, d=12, E=4, L=2, k=2):
        super().__init__(); self.k = k
        self.emb = nn.Embedding(V, d); self.rnn = nn.GRU(d, d, batch_first=True)
        self.routers = nn.ModuleList(nn.Linear(d, E, bias=False) for _ in range(L)); self.W = nn.Parameter(torch.randn(L, E, d, d) * d ** -0.5); self.head = nn.Linear(d, V)
    def forward(self, ids):
        x = self.rnn(self.emb(ids))[0]; rl = []
        for r, W in zip(self.routers, self.W):
            z = r(x); rl.append(z.flatten(0, 1)); p = z.softmax(-1)
            g, i = p.topk(self.k, -1); g = g / g.sum(-1, keepdim=True)
            gate = torch.zeros_like(p).scatter(-1, i, g)
            x = x + torch.einsum("bte,btd,edf->btf", gate, x, W)
        return self.head(x), rl

def make(seed):
    torch.manual_seed(seed)
    am = torch.ones(4, 9, dtype=torch.long); am[1, 6:] = 0; am[3, 4:] = 0
    return {"model": MoE(), "ids": torch.randint(0, 23, (4, 9)) * am, "attention_mask": am}

def balance(router_logits, attention_mask, top_k):
    z = torch.cat(router_logits, 0); E = z.shape[-1]
    p = z.softmax(-1)
    sel = F.one_hot(p.topk(top_k, -1).indices, E).float()                # [L*B*T, k, E]
    w = attention_mask.reshape(-1).repeat(len(router_logits)).to(p.dtype)
    f = (sel * w[:, None, None]).sum(0) / w.sum()                        # [k, E]: each slot sums to 1
    P = (p * w[:, None]).sum(0) / w.sum()
    return E * (f * P[None]).sum()

def right(model, batch, coef=0.02, top_k=2):
    ids, am = batch["ids"], batch["attention_mask"]
    logits, rl = model(ids)
    y = ids.masked_fill(am == 0, -100)[:, 1:]
    ce = F.cross_entropy(logits[:, :-1].flatten(0, 1), y.flatten(), ignore_index=-100)
    aux = balance(rl, am, top_k)
    return ce + coef * aux, {"ce": ce.item(), "balance": aux.item()}

if __name__ == "__main__":
    b = make(0); m = b.pop("model"); l, met = right(m, b); l.backward()
    logits, rl = m(b["ids"]); cnt = [0.0] * 4; P = [0.0] * 4; n = 0; s = c = 0
    for z in rl:
        for j in range(36):
            if b["attention_mask"][j // 9, j % 9]:
                p = z[j].softmax(-1).tolist(); n += 1
                for e in sorted(range(4), key=lambda e: -p[e])[:2]: cnt[e] += 1
                for e in range(4): P[e] += p[e]
    slow = 4 * sum(cnt[e] / n * P[e] / n for e in range(4))
    lp = logits.log_softmax(-1)
    for i in range(4):
        for t in range(8):
            if b["attention_mask"][i, t + 1]: s += -lp[i, t, b["ids"][i, t + 1]].item(); c += 1
    print(met, "slow", s / c, slow, "router grads", [r.weight.grad.norm().item() for r in m.routers])
    assert abs(met["balance"] - slow) < 1e-5 and abs(met["ce"] - s / c) < 1e-5 and all(p.grad.norm() > 0 for p in m.parameters())
    e = torch.eye(4).repeat(2, 1) + torch.eye(4).roll(1, 0).repeat(2, 1)   # balanced: the value is k
    assert abs(balance([20 * e], torch.ones(8), 2) - 2) < 1e-4
