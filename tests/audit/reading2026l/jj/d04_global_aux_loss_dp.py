"""Global-batch MoE balancing loss too weak by the number of data-parallel ranks. NVIDIA/Megatron-LM#3769 (issue #3672), https://github.com/NVIDIA/Megatron-LM/pull/3769, 2026.
For global_aux_loss the expert counts and the token number are summed over all data-parallel ranks, but the router probabilities are those of
the rank. The loss divides by the square of the global token number, and gradients are then averaged over ranks, so the balancing
gradient is 1/dp_size of what the same coefficient gives with the per-rank aux loss."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "mixture of experts"
KIND = "loss"
INPUTS = {"x": "token features, [ranks, tokens of a rank, width]; the first axis is the data-parallel rank", "y": "class of each token, [ranks, tokens]"}
SETTINGS = {"coeff": "weight of the balancing loss, 0.1", "topk": "experts per token, 2"}
NOTES = ("Simulates data parallelism in one process: every rank computes its loss on its own tokens and the losses (so the gradients) are averaged over ranks. "
         "The loss of a rank is the mean cross entropy of its tokens plus a balancing term whose expert counts are shared by all ranks. "
         "After averaging over ranks the balancing part must be that of the whole global batch, coeff * E * sum_e f_e * P_e, where f_e is the part of all T*topk assignments of the global batch that go to expert e "
         "(a constant, no gradient) and P_e the mean full-softmax router probability of expert e over all T tokens of all ranks. It does not depend on the number of ranks. All ranks have the same number of tokens. "
         "Gate weights are the softmax probabilities of the chosen experts, not renormalised. All parameters are used.")

class MoE(nn.Module):
    def __init__(self, width=12, experts=4, classes=7):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.head = nn.Linear(width, classes)
    def forward(self, x, topk):
        probs = self.router(x).softmax(-1)
        w, idx = probs.topk(topk, -1)
        chosen = F.one_hot(idx, probs.shape[-1]).sum(-2)
        gate = probs * chosen
        h = sum(gate[..., e:e + 1] * torch.tanh(f(x)) for e, f in enumerate(self.experts))
        return self.head(h), probs, chosen

def make(seed):
    torch.manual_seed(seed)
    return {"x": torch.randn(4, 10, 12), "y": torch.randint(0, 7, (4, 10)), "model": MoE()}

def _switch_aux(probs_sum, tokens_per_expert, total_tokens, topk, coeff):
    E = probs_sum.shape[-1]
    return (probs_sum * tokens_per_expert).sum() * (E * coeff / (topk * total_tokens * total_tokens))

def broken(model, batch, coeff=0.1, topk=2):
    x, y = batch["x"], batch["y"]
    dp = x.shape[0]
    outs = [model(x[r], topk) for r in range(dp)]
    counts = sum(o[2].sum(0) for o in outs).float()
    total = sum(o[1].shape[0] for o in outs)
    losses = []
    for r, (logits, probs, _) in enumerate(outs):
        aux = _switch_aux(probs.sum(0), counts, total, topk, coeff)
        losses.append(F.cross_entropy(logits, y[r]) + aux)
    return torch.stack(losses).mean()

def right(model, batch, coeff=0.1, topk=2):
    x, y = batch["x"], batch["y"]
    dp = x.shape[0]
    outs = [model(x[r], topk) for r in range(dp)]
    counts = sum(o[2].sum(0) for o in outs).float()
    total = sum(o[1].shape[0] for o in outs)
    losses = []
    for r, (logits, probs, _) in enumerate(outs):
        aux = _switch_aux(probs.sum(0), counts, total, topk, coeff) * dp
        losses.append(F.cross_entropy(logits, y[r]) + aux)
    return torch.stack(losses).mean()

if __name__ == "__main__":
    d = make(0); m = d.pop("model")
    logits, probs, ch = m(d["x"].flatten(0, 1), 2)
    ref = F.cross_entropy(logits, d["y"].flatten()) + 0.1 * 4 * ((ch.float().mean(0) / 2) * probs.mean(0)).sum()
    b, r = broken(m, d), right(m, d)
    print("global batch", ref.item(), "right", r.item(), "broken", b.item()); assert abs(r - ref) < 1e-5 < 1e-2 < abs(b - ref)
