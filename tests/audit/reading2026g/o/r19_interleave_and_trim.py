"""Accuracy with the sampler's extra examples removed. Gathered results are interleaved (rank 0's first, rank 1's first, ...), not put end to end, then cut to the length of the data set: DistributedSampler deals indices like cards and repeats the first ones to make all ranks equally long. Convention of torch.utils.data.DistributedSampler (indices rank::W)."""
FAMILY = "metrics over ranks"
KIND = "metric over ranks"
INPUTS = {"ranks": "list, per rank {'correct': [n] 0/1 for samples rank, rank + W, rank + 2W, ... in that order (wrapped at the end), 'size': true number of samples, same on all ranks}"}
SETTINGS = {}
NOTES = ("Needs DistributedSampler(shuffle=False, drop_last=False), equal lengths on all ranks = ceil(size / W). The last W * n - size interleaved entries are repeated samples and are dropped. Number = mean over the size true samples. Twin: single(whole vector).")
import torch


def right(ranks):
    size = ranks[0]["size"]
    together = torch.stack([r["correct"] for r in ranks], dim=1).reshape(-1)      # [n, W] -> original order
    return together[:size].double().mean().item()


def single(correct):
    return correct.double().mean().item()


def make(seed, size=None, world=4):
    g = torch.Generator().manual_seed(seed)
    size = size or int(torch.randint(9, 30, (1,), generator=g))
    whole = (torch.rand(size, generator=g) < 0.4).long()
    n = -(-size // world)
    idx = torch.arange(n * world) % size
    return {"ranks": [{"correct": whole[idx[r::world]], "size": size} for r in range(world)], "whole": whole}


if __name__ == "__main__":
    from torch.utils.data import DistributedSampler
    differ = 0
    for size in range(5, 30):
        d = make(size, size)
        for r in range(4):
            idx = list(DistributedSampler(range(size), num_replicas=4, rank=r, shuffle=False))
            assert d["whole"][idx].tolist() == d["ranks"][r]["correct"].tolist()
        assert right(d["ranks"]) == single(d["whole"])
        differ += torch.cat([r["correct"] for r in d["ranks"]]).double().mean().item() != single(d["whole"])
    print("equal to one process for 25 sizes; without trimming", differ, "would differ; last", right(d["ranks"]))
