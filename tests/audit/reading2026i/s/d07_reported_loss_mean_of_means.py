"""Reported classification loss adds micro-batch means over ranks. NVIDIA-NeMo/Automodel#3830 (issues #3829, #3846), https://github.com/NVIDIA-NeMo/Automodel/pull/3830, 2026.
The sequence-classification recipe kept one mean loss per micro-batch, summed these over the micro-batches and over the data-parallel ranks, and divided by the number of
micro-batches of one rank. The logged loss therefore grew with the number of ranks, and micro-batches of unequal size (3 + 1) were weighted equally. The fix adds summed losses and divides by the global number of labels."""
import torch
import torch.nn.functional as F

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "list over ranks; each rank is a list of micro-batches {'logits': [rows, classes], 'labels': [rows]}; all ranks have the same number of micro-batches, rows may differ"}
SETTINGS = {}
NOTES = "The number logged as 'loss' of one optimizer step: mean cross-entropy over all labelled rows of all ranks and micro-batches. single_process(rows) is the twin on the concatenation."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    ranks = []
    for sizes in ((3, 1), (3, 2)):
        ranks.append([{"logits": torch.randn(n, 4, generator=g) * 2, "labels": torch.randint(0, 4, (n,), generator=g)} for n in sizes])
    return {"ranks": ranks}


def broken(ranks):
    per_rank = []
    for batches in ranks:
        losses = [F.cross_entropy(b["logits"], b["labels"]) for b in batches]
        per_rank.append(torch.stack(losses).sum())
    total = torch.stack(per_rank).sum()                     # all-reduce
    return (total / len(ranks[0])).item()


def right(ranks):
    sums, counts = [], []
    for batches in ranks:
        losses = [F.cross_entropy(b["logits"], b["labels"]) * b["labels"].numel() for b in batches]
        sums.append(torch.stack(losses).sum())
        counts.append(sum(b["labels"].numel() for b in batches))
    return (torch.stack(sums).sum() / sum(counts)).item()   # both all-reduced


def single_process(ranks):
    batches = [b for rank in ranks for b in rank]
    return F.cross_entropy(torch.cat([b["logits"] for b in batches]), torch.cat([b["labels"] for b in batches])).item()


if __name__ == "__main__":
    d = make(0)
    print("broken", broken(**d), "right", right(**d), "single process", single_process(**d))
    assert abs(right(**d) - single_process(**d)) < 1e-5 and abs(broken(**d) - right(**d)) > 0.1
