"""Perplexity over several batches weights each batch by its sequences, not by its tokens.
keras-team/keras-hub#2958, https://github.com/keras-team/keras-hub/pull/2958, 2026 (August).
update_state divides a batch's loss by its own token count, multiplies by the number of sequences
and divides by all sequences in the end. A batch with few real tokens counts as much as a full one,
so the result depends on how the data were cut into batches."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'metrics'
KIND = 'metric over ranks'
INPUTS = {
    'parts': 'list of per-batch (or per-rank) dicts: token_loss [rows, time] and mask [rows, time], 1 = real token',
}
SETTINGS = {}
NOTES = (
    'Perplexity of the data set: exp of the summed token loss over the number of real tokens. The '
    'same for any division into parts. single(...) is the same on one process. '
)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    parts = []
    for fill in (12, 4, 9):
        lengths = torch.randint(max(1, fill - 3), fill + 1, (4,), generator=g)
        mask = (torch.arange(12)[None] < lengths[:, None]).float()
        level = 0.5 + 12 / fill + torch.rand(1, generator=g)
        parts.append({"token_loss": torch.rand(4, 12, generator=g) * level, "mask": mask})
    return {"parts": parts}


def broken(parts):
    total, count = 0.0, 0.0
    for p in parts:
        rows = p["token_loss"].shape[0]
        batch_mean = (p["token_loss"] * p["mask"]).sum() / p["mask"].sum()
        total += float(batch_mean) * rows
        count += rows
    return math.exp(total / count)


def right(parts):
    total = sum(float((p["token_loss"] * p["mask"]).sum()) for p in parts)
    count = sum(float(p["mask"].sum()) for p in parts)
    return math.exp(total / count)


def single(parts):
    loss = torch.cat([p["token_loss"] for p in parts])
    mask = torch.cat([p["mask"] for p in parts]).bool()
    return math.exp(float(loss[mask].mean()))


if __name__ == "__main__":
    d = make(0)
    print("broken", broken(**d), "right", right(**d), "single process", single(**d))
    assert abs(right(**d) - single(**d)) < 1e-4
    assert abs(broken(**d) - right(**d)) > 1e-2
