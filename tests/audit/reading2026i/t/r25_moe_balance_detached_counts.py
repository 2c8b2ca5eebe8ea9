"""MoE load balancing: token counts have no gradient, and the loss is not 0 at balance. Switch Transformer (Fedus et al. 2021, arXiv 2101.03961); Mixtral in transformers.
aux = experts * sum(f_i * P_i), with f the part of routed slots (top-k indices, no gradient) and P the mean router probability. Balance gives 1, not 0 (f is divided by top_k here; transformers does not divide). Padding is left out of both means, but prompt tokens are in, although the language loss ignores them."""
import torch
import torch.nn as nn
import torch.nn.functional as F
FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "labels": "next token (pre-shifted), -100 at prompt and padding, [rows, time]", "attention_mask": "1 at real tokens (prompt and answer), 0 at padding, [rows, time]"}
SETTINGS = {"coef": "weight of the balance loss, 0.02", "top_k": "experts per token, 2"}
NOTES = "Loss = mean cross-entropy over trained labels + coef * aux. aux is a mean over all real tokens, not over trained ones, by design. f is a constant. Experts: 4. All parameters are used."

class MoE(nn.Module):
    def __init__(self, vocab=31, width=16, experts=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.Parameter(0.3 * torch.randn(experts, width, width))
        self.head = nn.Linear(width, vocab)
    def forward(self, ids, top_k):
        h = self.rnn(self.emb(ids))[0]
        prob = self.router(h).softmax(-1)
        w, idx = prob.topk(top_k, -1)
        w = w / w.sum(-1, keepdim=True)
        every = torch.einsum("btd,edf->btef", h, self.experts)
        out = (w[..., None] * every.gather(2, idx[..., None].expand(*idx.shape, h.shape[-1]))).sum(2)
        return self.head(h + out), prob, idx

def make(seed):
    torch.manual_seed(seed); ids = torch.randint(1, 31, (3, 10)); lab = torch.randint(1, 31, (3, 10)); att = torch.ones(3, 10, dtype=torch.long)
    att[1, 7:] = 0; att[2, 9:] = 0; lab[:, :4] = -100; lab[att == 0] = -100
    return {"model": MoE(), "ids": ids, "labels": lab, "attention_mask": att}

def right(model, batch, coef=0.02, top_k=2):
    logits, prob, idx = model(batch["ids"], top_k)
    ce = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
    real = batch["attention_mask"].float()[..., None]
    f = (F.one_hot(idx, prob.shape[-1]).sum(2) * real).sum((0, 1)) / (real.sum() * top_k)
    p = (prob * real).sum((0, 1)) / real.sum()
    aux = prob.shape[-1] * (f.detach() * p).sum()
    return ce + coef * aux, {"ce": ce.item(), "aux": aux.item()}

if __name__ == "__main__":
    b = make(0); m = b.pop("model"); l, met = right(m, b); l.backward()
    _, prob, idx = m(b["ids"], 2); f, p, n = [0.0] * 4, [0.0] * 4, 0
    for r, t in b["attention_mask"].nonzero().tolist():
        n += 1
        for e in range(4):
            f[e] += (idx[r, t] == e).sum().item() / 2; p[e] += prob[r, t, e].item()
    ref = 4 * sum(a / n * c / n for a, c in zip(f, p))
    print(met, "loop aux", ref, "router grad", m.router.weight.grad.norm().item())
    assert abs(ref - met["aux"]) < 1e-5 and all(q.grad is not None and q.grad.abs().sum() > 0 for q in m.parameters())
