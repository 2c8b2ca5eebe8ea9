"""WPO: each pair's DPO loss is multiplied by the policy's OWN probability of both answers (length-normalised, divided by the sum of squared probabilities per position), detached and capped at 1. The weights are not renormalised, so a
batch of unlikely answers simply has a small loss. Zhou et al. 2024 (WPO); TRL use_weighting = True."""
import torch
from torch import nn

FAMILY = "preference losses"
KIND = "loss"
INPUTS = {"chosen_ids": "token ids, [pairs, time], right padded with 0", "chosen_mask": "1 on answer tokens, [pairs, time]",
          "rejected_ids": "token ids, [pairs, time], right padded with 0", "rejected_mask": "1 on answer tokens, [pairs, time]",
          "ref_chosen": "log-probability of the chosen answer under the reference (sum), [pairs], constant",
          "ref_rejected": "the same for the rejected answer, [pairs], constant"}
SETTINGS = {"beta": "DPO strength, 0.1"}
NOTES = ("Weighted preference loss (DPO family). Reduction: token sum for the DPO log-ratio, token MEAN for the weight; sum over pairs of weight * loss divided by the number of pairs (not by the sum of weights). "
         "The weight depends on the parameters but is detached. ref_* are constants. All parameters are used. Any number of pairs.")

class TinyLM(nn.Module):
    """Causal by construction; right padding after a row's end cannot change earlier logits."""
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def random_groups(g, groups, size, time, vocab):
    """[groups, size, time]: the rows of a group share one prompt; right padded; mask is 1 on the completion."""
    ids, mask = torch.zeros(groups, size, time, dtype=torch.long), torch.zeros(groups, size, time)
    for i in range(groups):
        p = int(torch.randint(2, 4, (1,), generator=g))
        prompt = torch.randint(1, vocab, (p,), generator=g)
        for s in range(size):
            end = int(torch.randint(p + 2, time + 1, (1,), generator=g))
            ids[i, s, :end] = torch.cat([prompt, torch.randint(1, vocab, (end - p,), generator=g)])
            mask[i, s, p:end] = 1.0
    return ids, mask

def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    ids, mask = random_groups(g, 5, 2, 10, 32)
    (c, r), (cm, rm), model = ids.unbind(1), mask.unbind(1), TinyLM()
    with torch.no_grad():
        rc, rr = [_score(model, a, b)[0] + torch.randn(5, generator=g) for a, b in ((c, cm), (r, rm))]
    return {"model": model, "chosen_ids": c, "chosen_mask": cm, "rejected_ids": r, "rejected_mask": rm, "ref_chosen": rc, "ref_rejected": rr}


def _score(model, ids, mask):
    lp, mask = model(ids)[:, :-1].log_softmax(-1), mask[:, 1:]
    token = lp.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        on_policy = token - torch.logsumexp(2 * lp, -1)                    # log p - log sum p^2: 0 on average for own samples
        log_weight = (on_policy * mask).sum(1) / mask.sum(1)
    return (token * mask).sum(1), log_weight


def right(model, batch, beta=0.1):
    c, wc = _score(model, batch["chosen_ids"], batch["chosen_mask"])
    r, wr = _score(model, batch["rejected_ids"], batch["rejected_mask"])
    weight = torch.exp(wc + wr).clamp(max=1.0)
    dpo = -nn.functional.logsigmoid(beta * ((c - batch["ref_chosen"]) - (r - batch["ref_rejected"])))
    return (weight * dpo).mean(), {"weight": weight.mean().item()}


def grads(loss, model):
    return [g if g is not None else torch.zeros_like(p)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True))]


def close(a, b, tol=1e-5):
    return all(torch.allclose(x, y, rtol=1e-4, atol=tol) for x, y in zip(a, b))

if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss, metrics = right(model, d)
    slow, weights = 0.0, []
    for i in range(5):
        s, w = [], 1.0
        for side in ("chosen", "rejected"):
            ids, mask, total, logw, n = d[side + "_ids"], d[side + "_mask"], 0.0, 0.0, 0
            for t in range(1, 10):
                if mask[i, t] == 1:
                    p = model(ids[i:i + 1, :t])[0, -1].softmax(-1)
                    total = total + torch.log(p[ids[i, t]])
                    logw, n = logw + torch.log(p[ids[i, t]] / (p * p).sum()).item(), n + 1
            s.append(total - d["ref_" + side][i])
            w *= torch.exp(torch.tensor(logw / n)).item()
        weights.append(min(w, 1.0))
        slow = slow + weights[-1] * torch.log(1 + torch.exp(-0.1 * (s[0] - s[1]))) / 5
    g1, g2 = grads(loss, model), grads(slow, model)
    print("loss", loss.item(), "explicit", slow.item(), "weights", [round(x, 3) for x in weights], metrics)
    print("gradient norm", sum((g ** 2).sum() for g in g1).sqrt().item(), "equal", close(g1, g2))
    assert abs(loss.item() - slow.item()) < 1e-5 and close(g1, g2)
