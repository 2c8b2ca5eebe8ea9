"""Synthetic padding rows dilute per-sequence metrics. verl-project/verl#7771,
https://github.com/verl-project/verl/issues/7771, 2026 (fix verl-project/verl#7785, 2026).
To make the batch divisible by the ranks, rows with an all-zero response mask are added before the off-policy metrics are
computed. The metrics average per-sequence values over all rows, and such a row has mean log probability 0, hence
perplexity 1 and gap 0. The reported training perplexity shrinks with the number of padding rows."""
import torch

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "list with one dict per rank: log_prob [rows, time] of the training engine, response_mask [rows, time] "
                   "(1 = generated token); rows with an all-zero mask are fillers, put in to give all ranks as many rows"}
SETTINGS = {}
NOTES = ("Training perplexity: exp of the negative mean log probability of a sequence, averaged over the real sequences "
         "of all ranks, each sequence with the same weight. Fillers must not change it. The driver sees all rows of all "
         "ranks. single() is the one-process twin without fillers. No gradient.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rows, t, world = 9, 8, 4
    per = -(-rows // world)
    lens = torch.randint(2, t + 1, (rows,), generator=g)
    mask = (torch.arange(t)[None] < lens[:, None]).float()
    logp = -torch.rand(rows, t, generator=g) * 3
    fill = per * world - rows
    logp = torch.cat([logp, logp[:1].expand(fill, t)])
    mask = torch.cat([mask, torch.zeros(fill, t)])
    return {"ranks": [{"log_prob": logp[i * per:(i + 1) * per], "response_mask": mask[i * per:(i + 1) * per]}
                      for i in range(world)]}


def _masked_mean(x, mask):
    return (x * mask).sum(-1) / (mask.sum(-1) + 1e-8)


def broken(ranks):
    logp = torch.cat([r["log_prob"] for r in ranks])
    mask = torch.cat([r["response_mask"] for r in ranks])
    return torch.exp(-_masked_mean(logp, mask)).mean().item()


def right(ranks):
    logp = torch.cat([r["log_prob"] for r in ranks])
    mask = torch.cat([r["response_mask"] for r in ranks])
    real = mask.sum(-1) > 0
    return torch.exp(-_masked_mean(logp[real], mask[real])).mean().item()


def single(log_prob, response_mask):
    return torch.exp(-_masked_mean(log_prob, response_mask)).mean().item()


if __name__ == "__main__":
    c = make(0)["ranks"]
    logp, mask = (torch.cat([r[k] for r in c]) for k in ("log_prob", "response_mask"))
    ref = single(logp[:9], mask[:9])
    print("broken", broken(c), "right", right(c), "single", ref)
    assert abs(right(c) - ref) < 1e-6 and abs(broken(c) - ref) > 1e-2
