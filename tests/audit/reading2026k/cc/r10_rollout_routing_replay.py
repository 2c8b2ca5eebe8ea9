"""Rollout routing replay (R3, arXiv 2510.11370; Megatron-LM, verl, SkyRL, prime-rl): in RL of a MoE policy the trainer does not choose the experts by its own router, it takes the indices
that the inference engine recorded, even if they are not the top-k of the live router; the gate weights are the softmax of the LIVE logits over the recorded experts, so the router still gets a
gradient. An expert with the highest live score may so be left out. The loss is the clipped PPO surrogate against the log probabilities of the rollout."""
FAMILY = "moe"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "mask": "1.0 on sampled tokens, [rows, time]; column 0 is 0", "old_logp": "log probability of token t under the rollout policy, at t, [rows, time]; 0 where mask is 0",
          "advantages": "advantage of the row, [rows]", "routed_experts": "indices of the two experts that the rollout used for the token at t (all tokens, also the prompt), two different ones, [rows, time, 2]"}
SETTINGS = {"clip": "PPO clip, 0.2"}
NOTES = ("PPO: -min(ratio * A, clamp(ratio, 1 - clip, 1 + clip) * A), ratio = exp(logp - old_logp), mean over the tokens with mask 1 of all rows. Token t is predicted from position t-1, whose experts are routed_experts[:, t-1]. "
         "routed_experts replace the choice of the router; the order of the two indices makes no difference; the weights are the softmax of the live router logits over the two, with gradient into the router. old_logp, advantages, mask, routed_experts are constants. All parameters are used. No padding other than mask 0 at the end.")
import torch
import torch.nn as nn
import torch.nn.functional as F

V, D, E = 20, 16, 4


class TinyMoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.mix = nn.GRU(D, D, batch_first=True)
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.Parameter(torch.randn(E, D, D) * 0.3)
        self.head = nn.Linear(D, V)

    def forward(self, ids, routed):
        x = self.mix(self.embed(ids))[0]
        w = self.gate(x).gather(-1, routed).softmax(-1)
        y = x
        for e in range(E):
            y = y + (w * (routed == e)).sum(-1, keepdim=True) * F.silu(x @ self.experts[e])
        return self.head(y)


def make(seed):
    torch.manual_seed(seed)
    B, T = 4, 9
    model = TinyMoE()
    ids = torch.randint(0, V, (B, T))
    routed = torch.stack([torch.randperm(E)[:2] for _ in range(B * T)]).reshape(B, T, 2)
    mask = torch.zeros(B, T)
    for b in range(B):
        mask[b, 3:int(torch.randint(6, T + 1, (1,)))] = 1
    with torch.no_grad():
        lp = model(ids, routed)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        old = torch.zeros(B, T)
        old[:, 1:] = lp + 0.3 * torch.randn(B, T - 1)
    return {"model": model, "ids": ids, "mask": mask, "old_logp": old * mask, "advantages": torch.randn(B), "routed_experts": routed}


def right(model, batch, clip=0.2):
    logits = model(batch["ids"], batch["routed_experts"])
    logp = logits[:, :-1].log_softmax(-1).gather(-1, batch["ids"][:, 1:, None]).squeeze(-1)
    m = batch["mask"][:, 1:]
    ratio = ((logp - batch["old_logp"][:, 1:]) * m).exp()
    a = batch["advantages"][:, None]
    per = -torch.min(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
    return (per * m).sum() / m.sum()


if __name__ == "__main__":
    import math
    b = make(0)
    m = b.pop("model")
    l = right(m, b)
    l.backward()
    top = n = 0.0
    with torch.no_grad():
        h = m.mix(m.embed(b["ids"]))[0]
        for r in range(4):
            for t in range(1, 9):
                if b["mask"][r, t]:
                    x = h[r, t - 1]
                    i, j = b["routed_experts"][r, t - 1].tolist()
                    g = m.gate.weight @ x
                    wi = 1 / (1 + math.exp(float(g[j] - g[i])))
                    y = x + wi * F.silu(x @ m.experts[i]) + (1 - wi) * F.silu(x @ m.experts[j])
                    q = math.exp(float(m.head(y).log_softmax(-1)[b["ids"][r, t]] - b["old_logp"][r, t]))
                    A = float(b["advantages"][r])
                    top -= min(q * A, max(0.8, min(1.2, q)) * A)
                    n += 1
    print(l.item(), top / n, "router gradient", m.gate.weight.grad.norm().item())
    assert abs(l.item() - top / n) < 1e-5
