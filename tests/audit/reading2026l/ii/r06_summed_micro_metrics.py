"""Micro-batch metrics that are summed, not averaged (verl, NeMo-RL): each micro-batch divides by the number of valid tokens of the whole global batch, so the sum over micro-batches is already the mean; a complement (fraction kept) is formed only after the sum."""
import torch

FAMILY = "metrics over ranks or micro-batches"
KIND = "metric over ranks"
INPUTS = {"per_rank": "one dict per micro-batch (of all ranks): ratio [rows, time] importance ratio, mask [rows, time] 1 on response tokens; a micro-batch may have an empty mask; over all micro-batches there is at least one response token"}
SETTINGS = {"low": "lower bound of the ratio, 0.8", "high": "upper bound, 1.25"}
NOTES = ("Fraction of response tokens whose ratio lies outside [low, high] (these are masked out of the loss), over all micro-batches of all ranks. The denominator of every micro-batch is the global number of response tokens, known before "
         "the loop, so each entry is a share of the global mean and the entries are added, never averaged. The kept share is accumulated and the result is one minus the sum. Constants only. The twin uses the concatenation.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"per_rank": [{"ratio": torch.exp(0.3 * torch.randn(2, 9, generator=g)), "mask": (torch.rand(2, 9, generator=g) < q).float()} for q in (0.9, 0.2, 0.0, 0.6)]}


def right(per_rank, low=0.8, high=1.25):
    global_tokens = sum(b["mask"].sum() for b in per_rank)
    kept = 0.0
    for b in per_rank:
        inside = ((b["ratio"] >= low) & (b["ratio"] <= high)).float()
        kept += float((inside * b["mask"]).sum() / global_tokens)
    return 1.0 - kept


def twin(per_rank, low=0.8, high=1.25):
    r = torch.cat([b["ratio"][b["mask"].bool()] for b in per_rank])
    return float(((r < low) | (r > high)).float().mean())


if __name__ == "__main__":
    print(right(**make(0)), twin(**make(0)))
