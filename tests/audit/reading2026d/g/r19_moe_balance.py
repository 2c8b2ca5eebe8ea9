"""MoE load balancing (Switch, Mixtral). The share f of tokens routed to an expert comes from a hard top-k and has NO gradient; it multiplies the mean router probability P. Its minimum is alpha, not zero, and padded tokens do not count."""
FAMILY = "auxiliary"
KIND = "loss"
INPUTS = {"ids": "[rows, time], 0 is padding", "loss_mask": "1 on trained tokens", "attention_mask": "1 on real tokens, [rows, time]"}
SETTINGS = {"alpha": "weight of the balance loss, 0.01", "top_k": "experts per token, 2"}
NOTES = "Cross-entropy (mean over trained tokens of all rows) plus auxiliary (statistics over all real tokens of the batch, so it is not additive over micro-batches). f is a constant. All parameters used."
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

V, D = 23, 16


class Tiny(nn.Module):
    """Causal recurrent model: ids [rows, time] -> logits [rows, time, V]."""

    def __init__(self, out=V):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.rnn = nn.GRU(D, D, batch_first=True)
        self.head = nn.Linear(D, out, bias=False)

    def hidden(self, ids):
        return self.rnn(self.emb(ids))[0]

    def forward(self, ids):
        return self.head(self.hidden(ids))


def base_rows(seed, rows=6, time=10, prompt=3):
    torch.manual_seed(seed)
    model = Tiny()
    ids = torch.randint(1, V, (rows, time))
    length = torch.randint(prompt + 2, time + 1, (rows, 1))
    pos = torch.arange(time)[None]
    ids = ids.masked_fill(pos >= length, 0)
    loss_mask = ((pos >= prompt) & (pos < length)).float()
    return model, ids, loss_mask


def flat_grad(model, loss):
    params = list(model.parameters())
    gs = torch.autograd.grad(loss, params, allow_unused=True, retain_graph=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in zip(params, gs)])
E = 4


class Moe(Tiny):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.experts = nn.Parameter(torch.randn(E, D, D) / 4)

    def forward(self, ids, top_k=2):
        h = self.hidden(ids)
        p = self.router(h).softmax(-1)
        w, i = p.topk(top_k, -1)
        gate = torch.zeros_like(p).scatter(-1, i, w / w.sum(-1, keepdim=True))
        y = torch.einsum("btd,edf,bte->btf", h, self.experts, gate)
        return self.head(h + y), p, i


def make(seed):
    _, ids, mask = base_rows(seed)
    torch.manual_seed(seed)
    return {"model": Moe(), "ids": ids, "loss_mask": mask, "attention_mask": (ids != 0).float()}


def right(model, batch, alpha=0.01, top_k=2):
    logits, p, chosen = model(batch["ids"], top_k)
    real = batch["attention_mask"].bool()
    f = F.one_hot(chosen[real], E).sum(1).float().mean(0) / top_k
    aux = E * (f * p[real].mean(0)).sum()
    m = batch["loss_mask"][:, 1:]
    ce = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["ids"][:, 1:], reduction="none")
    return (ce * m).sum() / m.sum() + alpha * aux, {"aux": aux.item()}


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss, met = right(model, b); g = flat_grad(model, loss)
    logits, p, ch = model(b["ids"]); cnt = [0] * E; ps = [0.0] * E; n = 0
    for i, t in b["attention_mask"].nonzero().tolist():
        n += 1
        for e in ch[i, t].tolist(): cnt[e] += 1
        for e in range(E): ps[e] += p[i, t, e].item()
    aux = E * sum(c / n / 2 * q / n for c, q in zip(cnt, ps))
    router_grad = torch.autograd.grad(right(model, b)[0], model.router.weight)[0].norm()
    assert abs(aux - met["aux"]) < 1e-5 and router_grad > 0 and g.norm() > 0
    print("loss", loss.item(), met, "router grad", router_grad.item())
