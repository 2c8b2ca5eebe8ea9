"""The KL loss has no gradient. NovaSky-AI/SkyRL#1340, https://github.com/NovaSky-AI/SkyRL/issues/1340, 2026.
compute_approx_kl was decorated with torch.no_grad because it is also used to put a KL penalty into the reward. The same
function computes the KL term that is added to the policy loss. The loss value and the logged KL look right, but the term
does not pull the policy to the reference at all."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "prompt and response ids, [rows, time]", "loss_mask": "1 where the token is a trained response token, "
          "[rows, time]", "advantages": "one advantage per row, [rows]",
          "old_logp": "log probability of each token under the sampling policy, [rows, time], 0 in column 0",
          "ref_logp": "the same under the frozen reference, [rows, time]"}
SETTINGS = {"clip": "PPO clip, 0.2", "kl_coef": "weight of the k3 KL term in the loss, 0.1"}
NOTES = ("PPO clipped policy loss plus kl_coef times the k3 estimate of the KL to the reference, both means over trained "
         "tokens of all rows; the KL term is meant to be differentiated. advantages, old_logp, ref_logp are constants. "
         "Uses all parameters.")


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
    mask = torch.zeros(6, 10)
    for i, (p, n) in enumerate(zip(torch.randint(2, 5, (6,), generator=g).tolist(),
                                   torch.randint(3, 6, (6,), generator=g).tolist())):
        mask[i, p:p + n] = 1
    with torch.no_grad():
        lp = _logp(model, ids)
    noise = lambda s: s * torch.randn(6, 10, generator=g)
    return {"model": model, "ids": ids, "loss_mask": mask, "advantages": torch.randn(6, generator=g),
            "old_logp": lp + noise(0.1), "ref_logp": lp + noise(0.5)}


@torch.no_grad()
def _approx_kl_no_grad(logp, ref, mask):
    d = (ref - logp) * mask
    return (d.exp() - 1 - d) * mask


def _approx_kl(logp, ref, mask):
    d = (ref - logp) * mask
    return (d.exp() - 1 - d) * mask


def _policy(logp, batch, clip):
    mask = batch["loss_mask"]
    ratio = ((logp - batch["old_logp"]) * mask).exp()
    adv = batch["advantages"][:, None]
    loss = -torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv)
    return (loss * mask).sum() / mask.sum()


def broken(model, batch, clip=0.2, kl_coef=0.1):
    logp, mask = _logp(model, batch["ids"]), batch["loss_mask"]
    kl = _approx_kl_no_grad(logp, batch["ref_logp"], mask).sum() / mask.sum()
    policy = _policy(logp, batch, clip)
    return policy + kl_coef * kl, {"policy_loss": policy.item(), "kl": kl.item()}


def right(model, batch, clip=0.2, kl_coef=0.1):
    logp, mask = _logp(model, batch["ids"]), batch["loss_mask"]
    kl = _approx_kl(logp, batch["ref_logp"], mask).sum() / mask.sum()
    policy = _policy(logp, batch, clip)
    return policy + kl_coef * kl, {"policy_loss": policy.item(), "kl": kl.item()}


if __name__ == "__main__":
    c = make(0)
    m = c.pop("model")
    grads = []
    for f in (broken, right):
        m.zero_grad()
        loss, metrics = f(m, c)
        loss.backward()
        grads.append(torch.cat([p.grad.flatten() for p in m.parameters()]))
        print(f.__name__, loss.item(), metrics, "grad norm", grads[-1].norm().item())
    print("gradient difference", (grads[0] - grads[1]).norm().item())
    assert (grads[0] - grads[1]).norm() > 1e-3
