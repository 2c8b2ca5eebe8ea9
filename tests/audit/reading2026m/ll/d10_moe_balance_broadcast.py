"""The MoE load-balance loss does not depend on the load. mindspore-ai/hyper-parallel#752,
https://github.com/mindspore-ai/hyper-parallel/issues/752, 2026. expert_fraction has the shape [num_experts] and mean_score (mean of the sorted top-k scores)
the shape [top_k]; both are multiplied by broadcasting and all products are summed. Since the fractions add up to 1 the result is just the sum of the mean top-k scores: near constant,
equal for balanced and unbalanced routing, with a gradient that only flattens the scores."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "mixture of experts and auxiliary losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]; all rows are full (no padding)"}
SETTINGS = {"aux_weight": "weight of the load-balance loss, 0.05"}
VALUES = {"aux_weight": 0.05}
NOTES = """Language-model loss with one MoE layer (4 experts, top 2 by the softmax over all experts; the two chosen probabilities weight the expert outputs,
not renormalised). loss = lm + aux_weight * balance. lm: next-token cross-entropy, mean over all targets of all rows. balance = E * sum_e f_e * P_e, over the tokens of the whole batch (all positions):
f_e = share of the T*top_k assignments that go to expert e (sums to 1; counts, a constant without gradient); P_e = (1/T) * sum of the router probabilities of expert e over the tokens that
chose it (only selected probabilities count; gradient flows through them). It rises when many assignments and much probability fall on the same experts. All parameters of the model are used
(an expert without tokens gets a zero or no gradient)."""


class MoE(nn.Module):
    def __init__(self, width=12, experts=4, top_k=2):
        super().__init__()
        self.router, self.top_k = nn.Linear(width, experts, bias=False), top_k
        self.w = nn.Parameter(torch.randn(experts, width, width) * 0.3)

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        scores, chosen = probs.topk(self.top_k, dim=-1)
        outs = torch.tanh(torch.einsum("nd,edf->nef", x, self.w))
        y = (scores[..., None] * outs.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1]))).sum(1)
        return y, scores, chosen


class LM(nn.Module):
    def __init__(self, vocab=19, width=12):
        super().__init__()
        self.emb, self.rnn = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True)
        self.moe, self.head = MoE(width), nn.Linear(width, vocab)

    def forward(self, ids):
        h, _ = self.rnn(self.emb(ids))
        y, scores, chosen = self.moe(h.flatten(0, 1))
        return self.head(h + y.view_as(h)), scores, chosen


def make(seed):
    torch.manual_seed(seed)
    m = LM()
    with torch.no_grad():
        m.moe.router.weight.mul_(4)
    return {"model": m, "ids": torch.randint(0, 19, (3, 9))}


def broken(model, batch, aux_weight=0.05):
    logits, scores, chosen = model(batch["ids"])
    lm = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())
    experts = model.moe.w.shape[0]
    fraction = F.one_hot(chosen, experts).sum((0, 1)).float() / chosen.numel()
    mean_score = scores.mean(0)
    balance = experts * (fraction.unsqueeze(-1) * mean_score).sum()
    return lm + aux_weight * balance, {"lm": lm.detach(), "balance": balance.detach()}


def right(model, batch, aux_weight=0.05):
    logits, scores, chosen = model(batch["ids"])
    lm = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())
    experts = model.moe.w.shape[0]
    one_hot = F.one_hot(chosen, experts).float()
    fraction = one_hot.sum((0, 1)) / chosen.numel()
    prob = (scores[..., None] * one_hot).sum((0, 1)) / chosen.shape[0]
    balance = experts * (fraction * prob).sum()
    return lm + aux_weight * balance, {"lm": lm.detach(), "balance": balance.detach()}


if __name__ == "__main__":
    for f in (broken, right):
        b = make(0); m = b.pop("model")
        loss, met = f(m, b, **VALUES); loss.backward()
        print(f.__name__, loss.item(), {k: float(v) for k, v in met.items()}, "router grad", m.moe.router.weight.grad.norm().item())
    b = make(0); m = b.pop("model")
    _, s, c = m(b["ids"])
    T, ref = len(s), 0.0
    for e in range(4):
        n = sum(int(x == e) for row in c for x in row)
        ref += n / (2 * T) * sum(float(s[t, j].detach()) for t in range(T) for j in range(2) if c[t, j] == e) / T
    print("explicit loop", 4 * ref)
