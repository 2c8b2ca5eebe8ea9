"""User metric averaged as mean of per-rank means with unequal counts. huggingface/trl#7310 (PR #7311), https://github.com/huggingface/trl/issues/7310, 2026.
Reward functions may call log_metric only for some completions, so ranks hold different numbers of values. The flush took each rank's local mean and then the plain mean of the gathered means, so the ranks with few values weighed as much as those with many.
The fix gathers [sum, count] pairs and divides once. (The issue also reports a hang when a rank has no value; that is not modelled, every rank has one.)"""
import torch
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"values": "list over ranks; each a non-empty list of floats that reward functions logged under one name in this step"}
SETTINGS = {}
NOTES = "The metric is the mean over all logged values of all ranks in the step. Counts per rank differ. Single-process twin: mean of the joined list. Any number of ranks."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"values": [torch.rand(n, generator=g).add(0.4 * i).tolist() for i, n in enumerate((1, 6, 2, 3))]}


def single(values):
    v = [x for r in values for x in r]
    return sum(v) / len(v)


def broken(values):
    local = torch.tensor([sum(v) / len(v) for v in values])
    return local.mean().item()


def right(values):
    pairs = torch.tensor([[sum(v), float(len(v))] for v in values]).sum(0)
    return (pairs[0] / pairs[1]).item()


if __name__ == "__main__":
    v = make(0)["values"]
    print("broken", broken(v), "right", right(v), "single", single(v))
    assert abs(right(v) - single(v)) < 1e-5 < abs(broken(v) - single(v))
