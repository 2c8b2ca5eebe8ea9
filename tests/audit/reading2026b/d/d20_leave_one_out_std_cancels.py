"""The leave-one-out standard deviation is a difference of two rounded squares, so equal rewards get a tiny positive spread.
NVIDIA-NeMo/RL#4158, https://github.com/NVIDIA-NeMo/RL/pull/4158, 2026 (September).
With rewards [0, .95, .95, ...] the other samples of the first row are all equal and the spread should be
0 (then the advantage stays unscaled). E[x^2] - E[x]^2 in float32 gives 2e-7, the std 4.6e-4, and the
advantage becomes -2075 instead of -0.95."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'losses'
KIND = 'advantages'
INPUTS = {
    'rewards': 'reward of each sample, float32, [rows]',
    'groups': 'prompt index of each sample, [rows]',
}
SETTINGS = {
    'eps': 'added to the standard deviation, 1e-6',
}
NOTES = (
    'Leave-one-out: reward minus the mean of the other samples of the prompt, divided by the '
    '(unbiased) standard deviation of those other samples. Where that deviation is 0 the advantage '
    'is not scaled. '
)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rewards = (torch.rand(3, 8, generator=g) * 20).round() / 20
    rewards[1] = 0.95
    rewards[1, int(torch.randint(0, 8, (1,), generator=g))] = 0.0
    return {"rewards": rewards.flatten(), "groups": torch.arange(3).repeat_interleave(8)}


def _scale(advantage, std, eps):
    keep = (std == 0) & (advantage != 0)
    return torch.where(keep, advantage, advantage / (std + eps))


def broken(rewards, groups, eps=1e-6):
    same = (groups[:, None] == groups[None, :]).float()
    others = same - torch.eye(len(rewards))
    n = others.sum(1)
    mean = others @ rewards / n
    square = others @ rewards.square() / n
    var = (square - mean.square()).clamp(min=0) * n / (n - 1)
    return _scale(rewards - mean, var.sqrt(), eps)


def right(rewards, groups, eps=1e-6):
    out = torch.zeros_like(rewards)
    for i in range(len(rewards)):
        rows = (groups == groups[i]).nonzero()[:, 0]
        o = rewards[rows[rows != i]].double()
        std = (o - o.mean()).square().sum().div(len(o) - 1).sqrt()
        out[i] = _scale((rewards[i] - o.mean())[None], std[None], eps)[0]
    return out


if __name__ == "__main__":
    d = make(0)
    a, b = broken(**d), right(**d)
    print("rewards", d["rewards"][8:16].tolist())
    print("broken ", [round(x, 3) for x in a[8:16].tolist()])
    print("right  ", [round(x, 3) for x in b[8:16].tolist()])
    print("other prompts differ by", (a - b)[:8].abs().max().item())
    assert (a - b).abs().max() > 100 and (a - b)[:8].abs().max() < 1e-3
