"""Truncated importance sampling for the engine mismatch (Yao et al. 2025). Two different 'old' log-probs enter: those recomputed by the trainer (PPO ratio) and those reported by the inference engine (outer weight, truncated above only, no gradient)."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], 0 is padding", "loss_mask": "1 where the token is trained, [rows, time]",
          "old_logps": "log-probs of the trainer's frozen old policy, [rows, time-1]", "rollout_logps": "log-probs reported by the sampler, [rows, time-1]",
          "advantages": "one per row, [rows]"}
SETTINGS = {"clip": "PPO clip, 0.2", "cap": "upper bound of the mismatch weight, 2.0"}
NOTES = ("PPO family; mean over the trained tokens of all rows, the weights are NOT renormalised. old_logps, rollout_logps, advantages constants. "
         "When rollout_logps equal old_logps it is plain PPO. All parameters used.")
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

V, D = 23, 16


class Tiny(nn.Module):
    """Causal recurrent model: ids [rows, time] -> logits [rows, time, V]."""

    def __init__(self, out=V):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.rnn = nn.GRU(D, D, batch_first=True)
        self.head = nn.Linear(D, out, bias=False)

    def hidden(self, ids):
        return self.rnn(self.emb(ids))[0]

    def forward(self, ids):
        return self.head(self.hidden(ids))


def token_logps(model, ids):
    """log p(ids[:, t+1] | ids[:, :t+1]), shape [rows, time-1]."""
    lp = F.log_softmax(model(ids)[:, :-1].float(), dim=-1)
    return lp.gather(-1, ids[:, 1:, None]).squeeze(-1)


def base_rows(seed, rows=6, time=10, prompt=3):
    torch.manual_seed(seed)
    model = Tiny()
    ids = torch.randint(1, V, (rows, time))
    length = torch.randint(prompt + 2, time + 1, (rows, 1))
    pos = torch.arange(time)[None]
    ids = ids.masked_fill(pos >= length, 0)
    loss_mask = ((pos >= prompt) & (pos < length)).float()
    return model, ids, loss_mask


def flat_grad(model, loss):
    params = list(model.parameters())
    gs = torch.autograd.grad(loss, params, allow_unused=True, retain_graph=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in zip(params, gs)])


def make(seed):
    model, ids, mask = base_rows(seed)
    sh = (ids.shape[0], ids.shape[1] - 1)
    old = token_logps(model, ids).detach() + 0.2 * torch.randn(sh)
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logps": old, "rollout_logps": old + 0.5 * torch.randn(sh), "advantages": torch.randn(sh[0])}


def right(model, batch, clip=0.2, cap=2.0):
    lp = token_logps(model, batch["ids"])
    m = batch["loss_mask"][:, 1:]
    a = batch["advantages"][:, None]
    r = (lp - batch["old_logps"]).exp()
    mismatch = (batch["old_logps"] - batch["rollout_logps"]).exp().clamp(max=cap)
    per_token = -torch.minimum(r * a, r.clamp(1 - clip, 1 + clip) * a) * mismatch
    return (per_token * m).sum() / m.sum(), {"mismatch_mean": (mismatch * m).sum().item() / m.sum().item()}


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss, met = right(model, b)
    lp = token_logps(model, b["ids"]); m = b["loss_mask"][:, 1:]
    tot = 0.0
    for i, t in m.nonzero().tolist():
        a, r = b["advantages"][i], (lp[i, t] - b["old_logps"][i, t]).exp()
        w = min(2.0, math.exp((b["old_logps"] - b["rollout_logps"])[i, t].item()))
        tot = tot - w * min(r * a, r.clamp(0.8, 1.2) * a) / m.sum()
    g = flat_grad(model, loss)
    assert torch.allclose(loss, tot, atol=1e-5) and torch.allclose(g, flat_grad(model, tot), atol=1e-5) and g.norm() > 0
    print("loss", loss.item(), met, "grad", g.norm().item())
