"""The importance weight is clipped and detached, and the log probability has the gradient. CISPO (MiniMax-M1, arXiv
2506.13585): loss = - sg(min(ratio, 1 + eps)) * advantage * logp. Unlike PPO no token loses its gradient when the clip is
active, the value of the loss has no meaning (it is not the surrogate objective and may well fall below it), and there is no
lower bound on the weight."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "prompt and response ids, [rows, time]", "loss_mask": "1 = trained response token, [rows, time]",
          "old_logp": "log probability under the sampling policy, [rows, time], 0 in column 0", "advantages": "[rows]"}
SETTINGS = {"eps_high": "upper clip of the weight is 1 + eps_high, 0.3"}
NOTES = ("Policy-gradient family; mean over trained tokens of all rows. old_logp, advantages and the clipped ratio are "
         "constants. Off-policy: ratio differs from 1. All parameters used.")


class TinyLM(nn.Module):
    """One attention layer; `positions` [rows, time], `allowed` bool [rows, time, time] (default: causal)."""

    def __init__(self, vocab=32, width=16, max_pos=96):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions=None, allowed=None):
        t = ids.shape[1]
        if positions is None:
            positions = torch.arange(t).expand(ids.shape)
        if allowed is None:
            allowed = torch.ones(t, t, dtype=torch.bool).tril()
        x = self.tok(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        s = (q @ k.transpose(-1, -2) / x.shape[-1] ** 0.5).masked_fill(~allowed, -1e9)
        return self.head(F.gelu(x + self.out(s.softmax(-1) @ v)))


def _logp(model, ids):
    lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return F.pad(lp, (1, 0))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = TinyLM()
    ids = torch.randint(1, 32, (6, 10), generator=g)
    start = torch.randint(2, 5, (6, 1), generator=g)
    end = start + torch.randint(2, 6, (6, 1), generator=g)
    col = torch.arange(10)[None]
    with torch.no_grad():
        old = _logp(model, ids) + 0.4 * torch.randn(6, 10, generator=g)
    return {"model": model, "ids": ids, "loss_mask": ((col >= start) & (col < end)).float(), "old_logp": old,
            "advantages": torch.randn(6, generator=g)}


def right(model, batch, eps_high=0.3):
    logp, mask = _logp(model, batch["ids"]), batch["loss_mask"]
    weight = ((logp - batch["old_logp"]) * mask).exp().clamp(max=1 + eps_high).detach()
    loss = -(weight * batch["advantages"][:, None] * logp * mask).sum() / mask.sum()
    clipped = ((weight >= 1 + eps_high) * mask).sum() / mask.sum()
    return loss, {"clipped": clipped.item()}


if __name__ == "__main__":
    c = make(0)
    m = c.pop("model")
    loss, metrics = right(m, c)
    loss.backward()
    got = torch.cat([p.grad.flatten() for p in m.parameters()])
    m.zero_grad()
    n = c["loss_mask"].sum()
    for i in range(6):                     # token by token: weight as a number times the gradient of log pi
        lp = _logp(m, c["ids"][i:i + 1])[0]
        terms = [min((lp[t] - c["old_logp"][i, t]).exp().item(), 1.3) * c["advantages"][i].item() * lp[t]
                 for t in range(10) if c["loss_mask"][i, t]]
        (-sum(terms) / n).backward()
    want = torch.cat([p.grad.flatten() for p in m.parameters()])
    print("loss", loss.item(), metrics, "grad norm", got.norm().item(), "loop", want.norm().item())
    assert torch.allclose(got, want, atol=1e-5) and got.norm() > 0 and metrics["clipped"] > 0
