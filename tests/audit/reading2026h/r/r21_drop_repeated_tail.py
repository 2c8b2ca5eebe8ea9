"""The last entries of the gathered scores are thrown away. A distributed sampler deals samples i, i+world, ... to rank i
and repeats the first samples so that every rank has as many. After the gather the columns are interleaved (step by step
all ranks), which restores the order of the dataset, and everything after entry n is one of the repeats
(accelerate's gather_for_metrics). The repeats are evaluated but not counted."""
import torch

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "list with one dict per rank: correct (0/1 of each of its samples in the order of the sampler, [steps]) and n "
                   "(size of the evaluation set, the same on all ranks)"}
SETTINGS = {}
NOTES = ("Accuracy over the n samples of the set, each once. All ranks have ceil(n / world) samples, the surplus at the end "
         "being repeats of the first samples. single() is the one-process twin. No gradient.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    n, world = 13, 4
    correct = (torch.rand(n, generator=g) < 0.6).float()
    index = torch.arange(n)
    index = torch.cat([index, index[:-n % world]])
    return {"ranks": [{"correct": correct[index[r::world]], "n": n} for r in range(world)]}


def right(ranks):
    gathered = torch.stack([r["correct"] for r in ranks], 1).flatten()
    return gathered[:ranks[0]["n"]].mean().item()


def single(correct):
    return correct.mean().item()


if __name__ == "__main__":
    c = make(0)["ranks"]
    g = torch.Generator().manual_seed(0)
    data = (torch.rand(13, generator=g) < 0.6).float()
    print("over ranks", right(c), "single", single(data), "entries gathered", sum(len(r["correct"]) for r in c))
    assert right(c) == single(data)
