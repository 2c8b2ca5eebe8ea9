"""Balance loss over the tokens of the whole batch and router z-loss (Switch, arXiv 2101.03961; ST-MoE, arXiv 2202.08906; "global-batch" balance of Qwen, arXiv 2501.11873). The fraction of tokens f is
counted from indices and has no gradient, only the mean probability P has one; with k experts per token the f sum to 1 (counts divided by tokens * k). The loss is a product of two means, so it is
not the mean of the losses of the rows. Prompt tokens count for balance and z-loss although they are not trained; padding does not count."""
FAMILY = "moe"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "attention_mask": "1 on real tokens, 0 on right padding, [rows, time]", "labels": "next-token targets, already shifted, -100 where not trained (prompt, last token of a row, padding), [rows, time]"}
SETTINGS = {"top_k": "experts per token, 2", "aux": "weight of the balance loss, 0.01", "z": "weight of the z-loss, 0.001"}
NOTES = ("Cross entropy, mean over the trained tokens of all rows, plus aux * E * sum_e f_e P_e plus z * mean of logsumexp(router logits)^2. f_e (a constant: counts, no gradient): share of the top_k choices of all real tokens of the batch that fall on e; P_e: mean router probability of e over all real tokens of the batch. "
         "Because f and P are taken over the whole batch, the loss is not a sum of terms of single rows. Real tokens are those with attention_mask 1, trained or not. Gates: softmax probabilities of the chosen experts, not renormalised. "
         "All parameters are used. No attention between tokens; padding has no influence.")
import torch
import torch.nn as nn
import torch.nn.functional as F

V, D, E = 20, 16, 4


class TinyMoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.Parameter(torch.randn(E, D, D) * 0.3)
        self.head = nn.Linear(D, V)


def make(seed):
    torch.manual_seed(seed)
    B, T = 4, 10
    att = torch.zeros(B, T, dtype=torch.long)
    labels = torch.full((B, T), -100)
    ids = torch.randint(1, V, (B, T))
    for b in range(B):
        n = int(torch.randint(6, T + 1, (1,)))
        p = int(torch.randint(1, 4, (1,)))
        att[b, :n] = 1
        ids[b, n:] = 0
        labels[b, p - 1:n - 1] = ids[b, p:n]
    return {"model": TinyMoE(), "ids": ids, "attention_mask": att, "labels": labels}


def right(model, batch, top_k=2, aux=0.01, z=0.001):
    x = model.embed(batch["ids"])
    logits = model.gate(x)
    prob = logits.softmax(-1)
    w, idx = torch.topk(prob, top_k, dim=-1)
    y = x
    for e in range(E):
        y = y + (w * (idx == e)).sum(-1, keepdim=True) * F.silu(x @ model.experts[e])
    ce = F.cross_entropy(model.head(y).reshape(-1, V), batch["labels"].reshape(-1), ignore_index=-100)
    real = batch["attention_mask"].bool()
    f = F.one_hot(idx[real], E).float().sum(1).mean(0) / top_k
    balance = E * (f.detach() * prob[real].mean(0)).sum()
    zloss = torch.logsumexp(logits[real], -1).pow(2).mean()
    return ce + aux * balance + z * zloss


if __name__ == "__main__":
    import math
    b = make(0)
    m = b.pop("model")
    l = right(m, b)
    l.backward()
    count, psum, zsum, n, ce, k = [0] * E, [0.0] * E, 0.0, 0, 0.0, 0
    with torch.no_grad():
        for r in range(4):
            for t in range(10):
                if not b["attention_mask"][r, t]:
                    continue
                x = m.embed.weight[b["ids"][r, t]]
                lg = (m.gate.weight @ x).tolist()
                s = sum(math.exp(v) for v in lg)
                zsum += math.log(s) ** 2
                n += 1
                y = x.clone()
                for rank, e in enumerate(sorted(range(E), key=lambda e: -lg[e])):
                    psum[e] += math.exp(lg[e]) / s
                    if rank < 2:
                        count[e] += 1
                        y += math.exp(lg[e]) / s * F.silu(x @ m.experts[e])
                if b["labels"][r, t] != -100:
                    ce -= float(m.head(y).log_softmax(-1)[b["labels"][r, t]])
                    k += 1
    want = ce / k + 0.01 * E * sum(c / (2 * n) * p / n for c, p in zip(count, psum)) + 0.001 * zsum / n
    print(l.item(), want, "router gradient", m.gate.weight.grad.norm().item())
    assert abs(l.item() - want) < 1e-5
