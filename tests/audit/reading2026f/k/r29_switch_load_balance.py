"""Switch / GShard load balancing. The loss multiplies a NON-differentiable count f_e with the differentiable mean router probability P_e and the
number of experts; its value at perfect balance is top_k, not 0, and padding is left out of both statistics."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "auxiliary"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "attention_mask": "1 for real tokens, [rows, time]"}
SETTINGS = {"aux_coef": "weight of the balance loss, 0.01"}
NOTES = ("Next-token cross-entropy (mean over real target tokens) + aux_coef * n_experts * sum_e f_e P_e, f summing to top_k = 2. f comes from top-k and has no gradient by nature. Statistics over real tokens of the whole batch. All parameters are used (experts that no token chose would get zero gradients).")


class MoELM(nn.Module):
    def __init__(self, vocab=23, width=12, experts=4, top_k=2):
        super().__init__()
        self.emb, self.rnn = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.head, self.top_k = nn.Linear(width, vocab), top_k

    def forward(self, ids):
        h = self.rnn(self.emb(ids))[0]
        probs = torch.softmax(self.router(h), -1)
        top = probs.topk(self.top_k, -1)
        gates = torch.zeros_like(probs).scatter(-1, top.indices, top.values / top.values.sum(-1, keepdim=True))
        out = sum(gates[..., e:e + 1] * torch.tanh(f(h)) for e, f in enumerate(self.experts))
        return self.head(h + out), probs, top.indices


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    mask = (torch.arange(11)[None] < torch.tensor([11, 6, 8, 4])[:, None]).long()
    return {"model": MoELM(), "ids": torch.randint(1, 23, (4, 11), generator=g) * mask, "attention_mask": mask}


def right(model, batch, aux_coef=0.01):
    ids, real = batch["ids"], batch["attention_mask"].bool()
    logits, probs, chosen = model(ids)
    ce = F.cross_entropy(logits[:, :-1][real[:, 1:]], ids[:, 1:][real[:, 1:]])
    experts = probs.shape[-1]
    f = F.one_hot(chosen[real], experts).float().sum(1).mean(0)       # sums to top_k
    balance = experts * (f * probs[real].mean(0)).sum()
    return ce + aux_coef * balance, {"balance": balance.item()}


def check(loss, slow, model, tol=2e-5):
    """same value and same gradient as the explicit version; every parameter is used"""
    params = list(model.parameters())
    a = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    b = torch.autograd.grad(slow, params, retain_graph=True, allow_unused=True)
    assert all(x is not None for x in a), "unused parameter"
    b = [torch.zeros_like(p) if x is None else x for x, p in zip(b, params)]
    norm = torch.sqrt(sum((x ** 2).sum() for x in a)).item()
    diff = max((x - y).abs().max().item() for x, y in zip(a, b))
    print(f"loss {loss.item():.6f}  slow {slow.item():.6f}  grad norm {norm:.5f}  max grad diff {diff:.1e}")
    assert abs(loss.item() - slow.item()) < tol * max(1, abs(slow.item())) and diff < tol * max(1, norm) and norm > 1e-4


if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    logits, probs, chosen = m(b["ids"])
    f, P, n, ce, k = [0.0] * 4, [0.0] * 4, 0, 0.0, 0
    for i in range(4):
        for t in range(11):
            if b["attention_mask"][i, t]:
                n += 1
                for e in range(4):
                    P[e] = P[e] + probs[i, t, e]; f[e] += float(e in chosen[i, t].tolist())
                if t:
                    ce, k = ce - torch.log_softmax(logits[i, t - 1], 0)[b["ids"][i, t]], k + 1
    slow = ce / k + 0.01 * 4 * sum(x / n * y / n for x, y in zip(f, P))
    loss, metrics = right(m, b); print(metrics)
    check(loss, slow, m)
