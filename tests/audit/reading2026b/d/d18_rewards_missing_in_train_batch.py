"""The positive-example NLL term is always zero, because the train batch has no rewards.
NVIDIA-NeMo/RL#3792, https://github.com/NVIDIA-NeMo/RL/pull/3792, 2026 (August).
VAPO adds an NLL term on the completions that were right. The loss reads the rewards from its batch,
but the GRPO loop copies a fixed list of keys and rewards is not among them; the loss takes the
missing key for "no positive example". A weight of 0.1 trains bit for bit like 0."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'losses'
KIND = 'loss'
INPUTS = {
    'ids': 'prompt and completion ids, [rows, time]',
    'loss_mask': '1 where the token is trained, [rows, time]',
    'old_logps': 'log-probabilities of ids[:, 1:] at sampling, constants, [rows, time - 1]',
    'advantages': 'one per row, constants, [rows]',
    'rewards': 'outcome rewards, 0 or 1, constants, [rows]',
}
SETTINGS = {
    'clip': 'PPO clip, 0.2',
    'nll_weight': 'weight of the NLL of rewarded completions, 0.1',
}
NOTES = (
    'PPO-clip policy loss, mean over trained tokens of all rows, plus nll_weight times the mean NLL '
    'over the trained tokens of the rows with reward > 0. '
)


class Tiny(nn.Module):
    """Embedding + learned positions, one causal self-attention layer, MLP, head."""
    def __init__(self, vocab=20, width=16, heads=2, length=64):
        super().__init__()
        self.heads = heads
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def hidden(self, ids, positions=None, allowed=None):
        b, t = ids.shape
        if positions is None:
            positions = torch.arange(t).expand(b, t)
        ok = torch.ones(t, t, dtype=torch.bool).tril().expand(b, t, t)
        if allowed is not None:               # [b, t, t] bool, replaces the causal mask
            ok = allowed
        x = self.emb(ids) + self.pos(positions)
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        s = s.masked_fill(~ok[:, None], float("-inf"))
        x = x + self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))
        return self.norm(x + self.down(F.gelu(self.up(x))))

    def forward(self, ids, positions=None, allowed=None):
        return self.head(self.hidden(ids, positions, allowed))


def token_logps(model, ids, **kw):
    """log-probability of ids[:, 1:] given what comes before, [rows, time - 1]"""
    logits = model(ids, **kw)[:, :-1].log_softmax(-1)
    return logits.gather(-1, ids[:, 1:, None]).squeeze(-1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Tiny()
    ids = torch.randint(0, 20, (4, 10), generator=g)
    mask = torch.zeros(4, 10)
    for i in range(4):
        mask[i, 3:int(torch.randint(6, 11, (1,), generator=g))] = 1
    rewards = torch.randint(0, 2, (4,), generator=g).float()
    rewards[0], rewards[1] = 1.0, 0.0
    old = token_logps(model, ids).detach() + 0.1 * torch.randn(4, 9, generator=g)
    adv = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logps": old, "advantages": adv, "rewards": rewards}


def loss_fn(model, data, clip, nll_weight):
    logp, mask = token_logps(model, data["ids"]), data["loss_mask"][:, 1:]
    ratio = (logp - data["old_logps"]).exp()
    adv = data["advantages"][:, None]
    pg = -torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv)
    loss = (pg * mask).sum() / mask.sum()
    nll = torch.zeros(())
    if nll_weight > 0 and "rewards" in data:
        positive = mask * (data["rewards"] > 0).float()[:, None]
        nll = -(logp * positive).sum() / positive.sum().clamp(min=1)
    return loss + nll_weight * nll, {"positive_nll_loss": float(nll.detach())}


def broken(model, batch, clip=0.2, nll_weight=0.1):
    train_data = {k: batch[k] for k in ("ids", "loss_mask", "old_logps", "advantages")}
    return loss_fn(model, train_data, clip, nll_weight)


def right(model, batch, clip=0.2, nll_weight=0.1):
    train_data = {k: batch[k] for k in ("ids", "loss_mask", "old_logps", "advantages", "rewards")}
    return loss_fn(model, train_data, clip, nll_weight)


if __name__ == "__main__":
    b = make(0)
    model = b.pop("model")
    for f in (broken, right):
        loss, metrics = f(model, b)
        model.zero_grad()
        loss.backward()
        print(f.__name__, loss.item(), metrics, "gradient", model.head.weight.grad.norm().item())
    assert (broken(model, b)[0] - right(model, b)[0]).abs() > 0.05
