"""gather_for_metrics of accelerate: the last distributed batch is padded with samples from the start of the epoch so that all ranks have equally many; after the gather the duplicates at the end are cut off. It throws predictions away on purpose."""
import torch

FAMILY = "metrics over ranks or micro-batches"
KIND = "metric over ranks"
INPUTS = {"per_rank": "one dict per rank: pred [steps, batch] predicted class and label [steps, batch]. Global batch number s is the concatenation of the ranks' rows s in rank order, and the global batches follow the dataset in order",
          "size": "number of samples in the dataset; the last global batch is filled up with samples from the start of the dataset"}
SETTINGS = {}
NOTES = ("Accuracy over the dataset, each sample counted once. All global batches are complete (batch*ranks rows); only the first (size mod batch*ranks) rows of the last one are real (all, if the remainder is 0), "
         "the others repeat samples that were already counted and are dropped after the gather. The twin is the accuracy over the `size` samples in one process.")


def make(seed, R=3, B=4, size=29):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 4, (size,), generator=g)
    pred = torch.where(torch.rand(size, generator=g) < 0.5, label, torch.randint(0, 4, (size,), generator=g))
    S = -(-size // (R * B))
    idx = torch.arange(S * R * B) % size
    shape = lambda x: x[idx].view(S, R, B)
    return {"per_rank": [{"pred": shape(pred)[:, r], "label": shape(label)[:, r]} for r in range(R)], "size": size}


def right(per_rank, size):
    steps, B = per_rank[0]["pred"].shape
    glob = B * len(per_rank)
    hit = count = 0
    for s in range(steps):
        p = torch.cat([r["pred"][s] for r in per_rank])
        y = torch.cat([r["label"][s] for r in per_rank])
        if s == steps - 1 and size % glob:
            p, y = p[: size % glob], y[: size % glob]
        hit += (p == y).sum().item()
        count += p.numel()
    return hit / count


def twin(per_rank, size):
    p = torch.stack([r["pred"] for r in per_rank], 1).flatten()[:size]
    y = torch.stack([r["label"] for r in per_rank], 1).flatten()[:size]
    return (p == y).float().mean().item()


if __name__ == "__main__":
    print(right(**make(0)), twin(**make(0)))
