"""Advantages are whitened per context-parallel rank. THUDM/slime#2235,
https://github.com/THUDM/slime/pull/2235, 2026 (the same in radixark/miles#3229, 2026).
With context parallelism every rank holds a zigzag slice of each sequence, but the sums for the masked whitening were
reduced over the data-parallel group without the context-parallel dimension. Each cp rank used its own mean and variance,
so two parts of the same sequence got different affine maps and no rank had the global statistics."""
import torch

FAMILY = "sharding"
KIND = "advantages"
INPUTS = {"advantages": "per-token advantages, [rows, time]", "mask": "1 where the token is trained, [rows, time]"}
SETTINGS = {"dp": "data-parallel ranks, 2 (rows are dealt in equal blocks)",
            "cp": "context-parallel ranks, 2 (time is cut in 2*cp chunks, rank i holds chunks i and 2*cp-1-i)"}
NOTES = ("Masked whitening with the mean and the Bessel-corrected variance over the trained tokens of the whole batch; "
         "entries outside the mask are transformed as well and ignored later. Rows must be divisible by dp, time by "
         "2*cp. Ranks are simulated in one process. No gradient.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    lens = torch.randint(5, 17, (8,), generator=g)
    mask = (torch.arange(16)[None] < lens[:, None]).float()
    adv = torch.randn(8, 16, generator=g) + torch.linspace(-1, 1, 16)
    return {"advantages": adv * mask, "mask": mask}


def _columns(time, cp, rank):
    c = time // (2 * cp)
    a, b = rank * c, (2 * cp - 1 - rank) * c
    return torch.cat([torch.arange(a, a + c), torch.arange(b, b + c)])


def _all_reduce(stats):
    total = torch.stack(stats).sum(0)
    return [total for _ in stats]


def _whiten(shards, masks, groups, eps=1e-8):
    stats = {k: torch.stack([(shards[k] * masks[k]).sum(), (shards[k] ** 2 * masks[k]).sum(), masks[k].sum()])
             for k in shards}
    for group in groups:
        for k, s in zip(group, _all_reduce([stats[k] for k in group])):
            stats[k] = s
    out = {}
    for k in shards:
        s, sq, n = stats[k]
        mean = s / n
        var = (sq / n - mean ** 2) * n / (n - 1)
        out[k] = (shards[k] - mean) * torch.rsqrt(var + eps)
    return out


def _run(advantages, mask, dp, cp, groups):
    per = advantages.shape[0] // dp
    index = {(d, c): (torch.arange(d * per, (d + 1) * per)[:, None], _columns(advantages.shape[1], cp, c)[None])
             for d in range(dp) for c in range(cp)}
    out = _whiten({k: advantages[i] for k, i in index.items()}, {k: mask[i] for k, i in index.items()}, groups)
    full = torch.empty_like(advantages)
    for k, i in index.items():
        full[i] = out[k]
    return full


def broken(advantages, mask, dp=2, cp=2):
    groups = [[(d, c) for d in range(dp)] for c in range(cp)]
    return _run(advantages, mask, dp, cp, groups)


def right(advantages, mask, dp=2, cp=2):
    groups = [[(d, c) for d in range(dp) for c in range(cp)]]
    return _run(advantages, mask, dp, cp, groups)


if __name__ == "__main__":
    c = make(0)
    b, r = broken(**c), right(**c)
    x = c["advantages"][c["mask"] > 0]
    ref = (c["advantages"] - x.mean()) / x.std()
    print("max |broken-right|", (b - r).abs().max().item(), "max |right-single process|", (r - ref).abs().max().item())
    assert (r - ref).abs().max() < 1e-4 < 1e-2 < (b - r).abs().max()
