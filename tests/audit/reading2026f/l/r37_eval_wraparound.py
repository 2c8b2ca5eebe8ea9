"""Accuracy over ranks with a wrapped sampler (DistributedSampler plus accelerate's gather_for_metrics). The sampler gives every rank the same number of items by REPEATING the first ones;
results are interleaved over ranks and cut to the size of the data set, so repeated items do not count twice. A mean of rank means would be wrong."""
FAMILY = "metrics over ranks"
KIND = "metric over ranks"
INPUTS = {"per_rank": "list over ranks of dicts with correct (list of 0/1, same length on every rank, item k of rank r is index k * ranks + r) and size (int, real data set size, same on all ranks)"}
SETTINGS = {}
NOTES = ("Result: share of correct items over the real data set. Needs the strided order of DistributedSampler without shuffling of the wrapped tail; the number of ranks is any, all ranks have equal lengths. "
         "single() is the single-process twin, which takes the list 'full' that make() also returns.")
import random


def make(seed):
    r = random.Random(seed)
    size, ranks = r.randint(3, 17), r.randint(1, 4)
    full = [r.randint(0, 1) for _ in range(size)]
    per = -(-size // ranks)
    wrapped = [full[i % size] for i in range(per * ranks)]
    return {"per_rank": [{"correct": wrapped[k::ranks], "size": size} for k in range(ranks)], "full": full}


def single(full):
    return sum(full) / len(full)


def right(per_rank):
    size = per_rank[0]["size"]
    gathered = [x for step in zip(*(p["correct"] for p in per_rank)) for x in step]
    return sum(gathered[:size]) / size


if __name__ == "__main__":
    naive = 0
    for seed in range(60):
        d = make(seed)
        assert abs(right(d["per_rank"]) - single(d["full"])) < 1e-12
        mean = sum(sum(p["correct"]) / len(p["correct"]) for p in d["per_rank"]) / len(d["per_rank"])
        naive += abs(mean - single(d["full"])) > 1e-9
    print("agrees in 60 of 60; a mean over rank means is wrong in", naive)
