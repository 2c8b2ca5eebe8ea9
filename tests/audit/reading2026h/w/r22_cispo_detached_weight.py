"""CISPO: the clipped importance weight is a constant and multiplies the log-prob.
MiniMax-M1 (arXiv 2506.13585); TRL and others as loss_type="cispo". The ratio is clipped from above only and detached; the gradient runs through log p alone, so a token over the clip still trains (PPO would give it none) and nothing is
min-ed with the unclipped term. The value of the loss has no meaning; its gradient has."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token is trained, [rows, time]", "old_logps": "log-probs of the sampling policy, [rows, time-1], a constant", "advantages": "one per row, a constant"}
SETTINGS = {"eps_high": "the weight is cut at 1 + eps_high, 4.0 in the setting of the paper; here 0.3"}
NOTES = "Policy gradient, mean over trained tokens of all rows. The importance weight is detached on purpose; no lower clip. old_logps, advantages and mask are constants. All parameters used."

class TinyLM(nn.Module):
    """One causal attention layer; `allowed` [.., q, k] replaces the causal mask when given."""
    def __init__(self, vocab=29, width=16, out=None):
        super().__init__()
        self.width = width
        self.emb = nn.Embedding(vocab, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = nn.Linear(width, out or vocab)

    def forward(self, ids, positions=None, allowed=None):
        T = ids.shape[1]
        if positions is None:
            positions = torch.arange(T).expand_as(ids)
        freq = torch.exp(-0.7 * torch.arange(self.width // 2))
        ang = positions[..., None].float() * freq
        h = self.emb(ids) + torch.cat([ang.sin(), ang.cos()], -1)
        if allowed is None:
            allowed = torch.ones(T, T, dtype=torch.bool).tril()
        att = self.q(h) @ self.k(h).transpose(1, 2) / math.sqrt(self.width)
        h = h + self.o(att.masked_fill(~allowed, float("-inf")).softmax(-1) @ self.v(h))
        return self.head(torch.tanh(h))


def token_logps(model, ids):
    """log p(ids[:, t+1] | ids[:, :t+1]), [rows, time-1]"""
    return model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = TinyLM()
    ids = torch.randint(0, 29, (4, 14), generator=g)
    with torch.no_grad():
        old = token_logps(model, ids) + 0.5 * torch.randn(4, 13, generator=g)
    return {"model": model, "ids": ids, "loss_mask": (torch.rand(4, 14, generator=g) < 0.7).float(), "old_logps": old, "advantages": torch.randn(4, generator=g)}


def right(model, batch, eps_high=0.3):
    logp = token_logps(model, batch["ids"])
    weight = (logp.detach() - batch["old_logps"]).exp().clamp(max=1 + eps_high)
    mask = batch["loss_mask"][:, 1:]
    loss = -(weight * batch["advantages"][:, None] * logp * mask).sum() / mask.sum()
    return loss, {"clipped": (((weight >= 1 + eps_high) * mask).sum() / mask.sum()).item()}


if __name__ == "__main__":
    d = make(0); m = d.pop("model")
    loss, metrics = right(m, d); loss.backward(); got = m.head.weight.grad.clone(); m.zero_grad()
    mask, slow = d["loss_mask"][:, 1:], 0.0
    lp = token_logps(m, d["ids"])
    for r in range(4):
        for t in range(13):
            if mask[r, t]:
                weight = min(math.exp(float(lp[r, t].detach() - d["old_logps"][r, t])), 1.3)
                slow = slow - weight * float(d["advantages"][r]) * lp[r, t] / mask.sum()
    slow.backward()
    print("loss", loss.item(), metrics, "gradient", got.norm().item(), "difference to loop", (got - m.head.weight.grad).abs().max().item())
    assert torch.allclose(got, m.head.weight.grad, atol=1e-5) and got.norm() > 0 and metrics["clipped"] > 0
