"""Pairs without a difference are skipped, but the reward-model loss still divides by all pairs.
pytorch/rl#3886, https://github.com/pytorch/rl/pull/3886, 2026 (June).
compute_reward_loss skips pairs whose chosen and rejected texts are the same. The sum of the others
is divided by the original batch size, so loss and gradient shrink with the share of such pairs."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'losses'
KIND = 'loss'
INPUTS = {
    'chosen': 'token ids of the preferred texts, padded with 0 at the right, [pairs, time]',
    'rejected': 'token ids of the other texts, [pairs, time]',
}
SETTINGS = {}
NOTES = (
    'Pairwise reward model: for each pair -log sigmoid(r_chosen - r_rejected), mean over the '
    'positions from the first difference to the end of the longer text; mean over the pairs that '
    'differ. Pairs that are the same carry no preference and are left out. '
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


class RewardModel(Tiny):
    def __init__(self):
        super().__init__()
        self.value = nn.Linear(16, 1)

    def rewards(self, ids):
        return self.value(self.hidden(ids)).squeeze(-1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    pairs, time = 6, 12
    prompt = torch.randint(1, 20, (pairs, 4), generator=g)
    texts = []
    for _ in range(2):
        tail = torch.randint(1, 20, (pairs, time - 4), generator=g)
        n = torch.randint(3, time - 3, (pairs,), generator=g)
        tail = tail * (torch.arange(time - 4)[None] < n[:, None])
        texts.append(torch.cat([prompt, tail], 1))
    same = torch.randperm(pairs, generator=g)[:2]
    texts[1][same] = texts[0][same]
    return {"model": RewardModel(), "chosen": texts[0], "rejected": texts[1]}


def _pair_losses(model, batch):
    rc, rr = model.rewards(batch["chosen"]), model.rewards(batch["rejected"])
    losses = []
    for c, r, a, b in zip(batch["chosen"], batch["rejected"], rc, rr):
        differ = (c != r).nonzero()
        if len(differ) == 0:
            continue
        start = int(differ[0])
        end = max(int((c != 0).sum()), int((r != 0).sum()))
        losses.append(-F.logsigmoid(a[start:end] - b[start:end]).mean())
    return losses, rc


def broken(model, batch):
    losses, rc = _pair_losses(model, batch)
    return sum(losses, rc.sum() * 0) / len(batch["chosen"])


def right(model, batch):
    losses, rc = _pair_losses(model, batch)
    return sum(losses, rc.sum() * 0) / max(1, len(losses))


if __name__ == "__main__":
    b = make(0)
    model = b.pop("model")
    keep = (b["chosen"] != b["rejected"]).any(1)
    only = {k: v[keep] for k, v in b.items()}
    print("broken", broken(model, b).item(), "right", right(model, b).item(), "without the equal pairs", right(model, only).item())
    assert torch.allclose(right(model, b), right(model, only), atol=1e-6)
    assert (broken(model, b) - right(model, b)).abs() > 0.05
