"""Dual-clip PPO (Ye et al. 2020). For negative advantages a max() with c*A is taken over the min() of PPO, which looks optimistic; right, since with A<0 the plain surrogate is unbounded for huge ratios."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], 0 is padding", "loss_mask": "1 where the token is trained, [rows, time]",
          "old_logps": "log-probs of the old policy for ids[:, 1:], [rows, time-1]", "advantages": "advantage of each token, [rows, time-1]"}
SETTINGS = {"clip": "PPO clip, 0.2", "c": "dual clip, lower bound of the ratio that is cut for A<0, 3.0, must exceed 1"}
NOTES = ("PPO family; sum over trained tokens divided by the number of trained tokens of all rows. log ratio is clamped to +-20 for safety, never active here. "
         "old_logps and advantages constants. All parameters used.")
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
    old = token_logps(model, ids).detach() + 1.6 * torch.randn(ids.shape[0], ids.shape[1] - 1)
    adv = torch.randn(ids.shape[0], ids.shape[1] - 1)
    old[:2, 3] = token_logps(model, ids).detach()[:2, 3] - 1.5     # two trained tokens with ratio e^1.5 ...
    adv[:2, 3] = -1.0                                              # ... and a negative advantage
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logps": old, "advantages": adv}


def right(model, batch, clip=0.2, c=3.0):
    lp = token_logps(model, batch["ids"])
    m = batch["loss_mask"][:, 1:]
    a = batch["advantages"]
    r = (lp - batch["old_logps"]).clamp(-20, 20).exp()
    l1 = torch.maximum(-a * r, -a * r.clamp(1 - clip, 1 + clip))
    l2 = torch.minimum(l1, -a * c)
    per_token = torch.where(a < 0, l2, l1)
    frac = ((l1 > -a * c) & (a < 0)).float().mul(m).sum() / m.sum()
    return (per_token * m).sum() / m.sum(), {"dual_clip_fraction": frac.item()}


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss, metrics = right(model, b)
    lp = token_logps(model, b["ids"]); m = b["loss_mask"][:, 1:]
    tot = 0.0
    for i, t in m.nonzero().tolist():
        a, r = b["advantages"][i, t], (lp[i, t] - b["old_logps"][i, t]).exp()
        obj = torch.minimum(r * a, r.clamp(0.8, 1.2) * a)
        if a < 0:
            obj = torch.maximum(obj, 3.0 * a)
        tot = tot - obj
    tot = tot / m.sum()
    g = flat_grad(model, loss)
    assert torch.allclose(loss, tot, atol=1e-5) and torch.allclose(g, flat_grad(model, tot), atol=1e-5) and g.norm() > 0
    print("loss", loss.item(), metrics, "grad", g.norm().item())
