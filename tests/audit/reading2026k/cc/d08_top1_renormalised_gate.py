"""Renormalising the gate with one expert per token cuts the router off the loss. jingyaogong/minimind#859,
https://github.com/jingyaogong/minimind/pull/859 (issue jingyaogong/minimind#858), 2026. With num_experts_per_tok=1 and norm_topk_prob=True
(the defaults) the chosen weight is divided by itself and is 1.0 for every token. The index is not differentiable, so the language
model loss does not reach the router at all; only the balance loss trains it, whose optimum is a uniform split. The fix normalises only
when more than one expert is chosen."""
FAMILY = "moe"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "labels": "next-token targets, already shifted, -100 where not trained, [rows, time]"}
SETTINGS = {"top_k": "experts per token, 1", "aux_coef": "weight of the balance loss, 5e-4"}
NOTES = ("Cross entropy, mean over the trained tokens of all rows, plus aux_coef times the Switch balance loss E * sum_e f_e P_e over all tokens (f_e: fraction of tokens routed to e, a constant; P_e: mean router probability). "
         "One MoE layer with residual: each token goes to its top_k experts, weighted with the softmax router probabilities; for top_k > 1 the weights are normalised to sum 1, for top_k = 1 the weight is the probability itself, so that the router learns from the cross entropy. "
         "All parameters of the model are used by this loss, the router by both terms; an expert that no token chose gets a zero gradient. No padding.")
import torch
import torch.nn as nn
import torch.nn.functional as F

V, D, E = 20, 16, 4


class TinyMoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.gate = nn.Linear(D, E, bias=False)
        self.up = nn.Parameter(torch.randn(E, D, 2 * D) * 0.3)
        self.down = nn.Parameter(torch.randn(E, 2 * D, D) * 0.3)
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, ids, route):
        x = self.embed(ids)
        h = x.reshape(-1, D)
        scores = self.gate(h).softmax(-1)
        weight, idx = route(scores)
        y = torch.zeros_like(h)
        for e in range(E):
            out = F.silu(h @ self.up[e]) @ self.down[e]
            w = (weight * (idx == e)).sum(-1, keepdim=True)
            y = y + w * out
        return self.head(x + y.reshape(x.shape)), scores, idx


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, V, (4, 12))
    labels = torch.randint(0, V, (4, 12))
    labels[:, :3] = -100
    return {"model": TinyMoE(), "ids": ids, "labels": labels}


def total(model, batch, route, aux_coef):
    logits, scores, idx = model(batch["ids"], route)
    ce = F.cross_entropy(logits.reshape(-1, V), batch["labels"].reshape(-1), ignore_index=-100)
    f = F.one_hot(idx, E).float().sum(1).mean(0)
    return ce + aux_coef * E * (f * scores.mean(0)).sum()


def broken(model, batch, top_k=1, aux_coef=5e-4):
    def route(scores):
        w, i = torch.topk(scores, top_k, dim=-1)
        return w / (w.sum(-1, keepdim=True) + 1e-20), i
    return total(model, batch, route, aux_coef)


def right(model, batch, top_k=1, aux_coef=5e-4):
    def route(scores):
        w, i = torch.topk(scores, top_k, dim=-1)
        if top_k > 1:
            w = w / (w.sum(-1, keepdim=True) + 1e-20)
        return w, i
    return total(model, batch, route, aux_coef)


if __name__ == "__main__":
    for f in (broken, right):
        x = make(0)
        m = x.pop("model")
        l = f(m, x)
        l.backward()
        print(f.__name__, l.item(), "router gradient", m.gate.weight.grad.norm().item())
