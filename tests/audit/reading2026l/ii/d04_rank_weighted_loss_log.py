"""The logged training loss weighs ranks, not tokens. deepseek-ai/DeepSpec#34, https://github.com/deepseek-ai/DeepSpec/issues/34, 2026.
The backward loss of the draft model used global denominators, but the logged train/loss was built from losses that each rank had
normalised by its own number of supervised tokens and that were then averaged over the ranks. A rank with one supervised token moved the
log as much as a rank with many, so the log was not the objective."""
import torch

FAMILY = "metrics over ranks or micro-batches"
KIND = "metric over ranks"
INPUTS = {"per_rank": "one dict per rank: ce [n] cross-entropy of each position, mask [n] 1 where the position is supervised (numbers of supervised positions differ between ranks and are at least 1)"}
SETTINGS = {}
NOTES = ("The number that is logged as train/loss: the training objective of the step, that is the sum of ce over the supervised positions of all "
         "ranks divided by the number of supervised positions of all ranks. Every rank holds only its own positions; sums over ranks are collectives, "
         "and what is logged passes through one mean over ranks. The twin computes it on the concatenation. Any number of ranks; constants only.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    out = []
    for k in (1, 5, 12, 20):
        m = torch.zeros(24)
        m[torch.randperm(24, generator=g)[:k]] = 1
        out.append({"ce": torch.rand(24, generator=g) * 3 + 4.0 / k, "mask": m})
    return {"per_rank": out}


def _dp_mean(values):
    return sum(values) / len(values)


def broken(per_rank):
    logged = [(r["ce"] * r["mask"]).sum() / r["mask"].sum() for r in per_rank]
    return float(_dp_mean(logged))


def right(per_rank):
    world = len(per_rank)
    total = sum(r["mask"].sum() for r in per_rank)                   # all-reduce
    logged = [(r["ce"] * r["mask"]).sum() * world / total for r in per_rank]
    return float(_dp_mean(logged))


def twin(per_rank):
    ce, m = (torch.cat([r[k] for r in per_rank]) for k in ("ce", "mask"))
    return float((ce * m).sum() / m.sum())


if __name__ == "__main__":
    i = make(0)
    print("broken", broken(**i), "right", right(**i), "twin", twin(**i))
