"""Switch-style load balancing plus router z-loss (Fedus et al. 2021; ST-MoE). The balance term multiplies a NON-differentiable count with a differentiable mean
probability and the number of experts: gradient flows through one factor only, the minimum is top_k and not 0, padding is left out."""
FAMILY = "auxiliary"
KIND = "loss"
INPUTS = {"ids": "[rows, time], right-padded with 0", "attention_mask": "1 on real tokens, [rows, time]"}
SETTINGS = {"top_k": "experts per token, 2", "balance": "weight 0.01", "z": "weight of the router z-loss, 0.001"}
NOTES = "Cross entropy: mean over real next tokens. Balance and z: mean over ALL real tokens of the batch, the last one of a row included. Uniform routing gives balance term = top_k. All parameters used."
import torch
import torch.nn as nn
import torch.nn.functional as F


class MoE(nn.Module):
    def __init__(self, vocab=31, width=16, experts=4, top_k=2):
        super().__init__()
        self.emb, self.rnn = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.head, self.top_k = nn.Linear(width, vocab), top_k

    def forward(self, ids):
        h = self.rnn(self.emb(ids))[0]
        r = self.router(h)
        w, idx = r.softmax(-1).topk(self.top_k, -1)
        gates = torch.zeros_like(r).scatter(-1, idx, w / w.sum(-1, keepdim=True))
        out = sum(gates[..., e:e + 1] * f(h) for e, f in enumerate(self.experts))
        return self.head(h + torch.tanh(out)), r


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    ids = torch.randint(1, 31, (4, 10), generator=g); n = torch.randint(4, 11, (4,), generator=g)
    att = (torch.arange(10) < n[:, None]).float()
    return {"model": MoE(), "ids": ids * att.long(), "attention_mask": att}


def right(model, batch, top_k=2, balance=0.01, z=0.001):
    att = batch["attention_mask"]
    logits, r = model(batch["ids"])
    ce = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["ids"][:, 1:], reduction="none")
    ce = (ce * att[:, 1:]).sum() / att[:, 1:].sum()
    r = r[att > 0]
    p, E = r.softmax(-1), r.shape[-1]
    share = F.one_hot(p.topk(top_k, -1).indices, E).sum(1).float().mean(0)        # sums to top_k
    aux = E * (share * p.mean(0)).sum()
    return ce + balance * aux + z * r.logsumexp(-1).square().mean(), {"balance": aux.item()}


def check(loss, slow, model):
    assert torch.isfinite(loss) and abs(loss.item() - float(slow)) < 1e-4 * (1 + abs(float(slow))), (loss, slow)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    unused = [n for (n, _), v in zip(model.named_parameters(), grads) if v is None]
    norm = sum(float(v.norm()) ** 2 for v in grads if v is not None) ** 0.5
    assert norm > 0 and not unused, (norm, unused)
    print(f"ok  loss {loss.item():.6f}  slow {float(slow):.6f}  gradient norm {norm:.6f}")

if __name__ == "__main__":
    import math
    d = make(0); model = d.pop("model")
    logits, r = [x.detach() for x in model(d["ids"])]
    ce, n, cnt, prob, zz, N = 0.0, 0, [0] * 4, [0.0] * 4, 0.0, 0
    for i in range(4):
        for t in range(10):
            if d["attention_mask"][i, t]:
                N += 1; p = r[i, t].softmax(-1).tolist()
                for e in sorted(range(4), key=lambda e: -p[e])[:2]: cnt[e] += 1
                prob = [a + b for a, b in zip(prob, p)]
                zz += math.log(sum(math.exp(float(x)) for x in r[i, t])) ** 2
                if t:
                    ce -= float(logits[i, t - 1].log_softmax(-1)[d["ids"][i, t]]); n += 1
    slow = ce / n + 0.01 * 4 * sum(c / N * p / N for c, p in zip(cnt, prob)) + 0.001 * zz / N
    check(right(model, d)[0], slow, model)
