"""Token counters shrink with context parallelism. areal-project/AReaL#1242 (fix #1249), https://github.com/areal-project/AReaL/issues/1242, 2026.
After the SFT loss became local to a context-parallel (CP) rank, n_tokens, n_valid_tokens and prompt_tokens were taken
from the CP-local loss_mask, while the export sums over the data-parallel group only. The counters were too small by
the CP factor; ratios such as the mean loss were unaffected."""
import torch
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "one dict per rank: dp (data-parallel index), cp (context-parallel index), loss_mask (the CP-local part of the rows of this dp index), "
                   "global_loss_mask (the same rows before the CP split; equal on all cp ranks of a dp index)"}
SETTINGS = {}
NOTES = ("n_valid_tokens = number of trained tokens of the global batch. The export is an all-reduce SUM over the data-parallel group of cp index 0. "
         "Single-process twin: single(rows). CP splits in zigzag into 2*cp chunks, so the time length must be divisible by 2*cp.")

def split(mask, cp, n):
    c = mask.chunk(2 * n, dim=1)
    return torch.cat([c[cp], c[2 * n - 1 - cp]], 1)

def make(seed, dp=2, cp=4):
    g = torch.Generator().manual_seed(seed)
    ranks = []
    for d in range(dp):
        rows = (torch.rand(3, 32, generator=g) < 0.4).long()
        for c in range(cp):
            ranks.append({"dp": d, "cp": c, "loss_mask": split(rows, c, cp), "global_loss_mask": rows})
    return {"ranks": ranks}

def dp_sum(ranks, value):
    return sum(value(r) for r in ranks if r["cp"] == 0)

def broken(ranks):
    return float(dp_sum(ranks, lambda r: r["loss_mask"].sum().item()))

def right(ranks):
    return float(dp_sum(ranks, lambda r: r["global_loss_mask"].sum().item()))

def single(rows):
    return float(sum(x.sum().item() for x in rows))

if __name__ == "__main__":
    ranks = make(0)["ranks"]
    s = single([r["global_loss_mask"] for r in ranks if r["cp"] == 0])
    print("broken", broken(ranks), "right", right(ranks), "single process", s)
    assert right(ranks) == s == sum(r["loss_mask"].sum().item() for r in ranks) != broken(ranks)
