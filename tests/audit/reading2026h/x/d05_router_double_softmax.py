"""Router probabilities taken for logits by the balancing loss. ByteDance-Seed/VeOmni#715 (same cause: huggingface/transformers#45131), https://github.com/ByteDance-Seed/VeOmni/pull/715, 2026.
The qwen3_moe top-k router overwrote its logits by their softmax and returned them as router_logits. The balancing loss applies
softmax itself, so it worked on softmax(softmax(x)): the distribution is flattened and the balancing gradient is far too weak."""
FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]"}
SETTINGS = {"top_k": "experts per token, 2", "aux_coef": "weight of the balancing loss, 0.5"}
NOTES = ("Next-token cross entropy, mean over all positions but the last, plus aux_coef times the Switch balancing loss "
         "experts * sum_e f_e * P_e over all tokens, f_e the fraction of the top-k assignments (a constant), P_e the mean router probability. "
         "Top-k weights are renormalized to sum to 1. No padding. Every parameter is used.")
import torch
import torch.nn.functional as F
from torch import nn


class MoE(nn.Module):
    def __init__(self, vocab=40, width=16, experts=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.Parameter(torch.randn(experts, width, width) * 0.3)
        self.head = nn.Linear(width, vocab)
        nn.init.normal_(self.gate.weight, std=0.7)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    return {"model": MoE(), "ids": torch.randint(0, 40, (3, 9), generator=g)}


def balancing(router_logits, top_k):
    experts = router_logits.shape[-1]
    weights = F.softmax(router_logits, dim=-1)
    chosen = torch.topk(weights, top_k, dim=-1).indices
    f = F.one_hot(chosen, experts).float().mean(0)            # [top_k, experts]
    p = weights.mean(0)
    return experts * torch.sum(f * p.unsqueeze(0))


def experts_out(model, x, weights, top_k):
    top, chosen = torch.topk(weights, top_k, dim=-1)
    top = top / top.sum(-1, keepdim=True)
    every = torch.einsum("nd,edf->nef", x, model.experts)
    return (every.gather(1, chosen.unsqueeze(-1).expand(-1, -1, x.shape[-1])) * top.unsqueeze(-1)).sum(1)


def broken(model, batch, top_k=2, aux_coef=0.5):
    ids = batch["ids"]
    x = model.embed(ids).flatten(0, 1)
    router_logits = model.gate(x)
    router_logits = F.softmax(router_logits, dim=-1, dtype=torch.float)
    y = x + torch.tanh(experts_out(model, x, router_logits, top_k))
    logits = model.head(y).view(*ids.shape, -1)
    ce = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return ce + aux_coef * balancing(router_logits, top_k)


def right(model, batch, top_k=2, aux_coef=0.5):
    ids = batch["ids"]
    x = model.embed(ids).flatten(0, 1)
    router_logits = model.gate(x)
    routing_weights = F.softmax(router_logits, dim=-1, dtype=torch.float)
    y = x + torch.tanh(experts_out(model, x, routing_weights, top_k))
    logits = model.head(y).view(*ids.shape, -1)
    ce = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return ce + aux_coef * balancing(router_logits, top_k)


if __name__ == "__main__":
    res = []
    for f in (broken, right):
        d = make(0)
        m = d.pop("model")
        loss = f(m, d)
        loss.backward()
        res.append((loss.item(), m.gate.weight.grad.norm().item()))
    print("loss, gate gradient: broken", res[0], "right", res[1])
    assert abs(res[0][1] - res[1][1]) > 1e-2
