"""Distributed evaluation (torch DistributedSampler + accelerate gather_for_metrics): the sampler repeats the first samples so that all ranks have equally many; the gathered results are interleaved back
to data-set order and cut to the data-set length. The code throws results away, and only some ranks lose any."""
import torch

FAMILY = "metrics over ranks or micro-batches"
KIND = "metric over ranks"
INPUTS = {"per_rank": "list over ranks; each a tensor [samples per rank] of per-sample scores in the order in which the rank saw them; rank r holds the samples r, r + ranks, r + 2*ranks, ... of the data set, "
                      "and where the data set ends before the last round is full, the round is filled up with samples from its start",
          "dataset_len": "number of samples of the data set"}
SETTINGS = {}
NOTES = """Mean score over the data set, each sample once. The ranks' tensors have equal length; entry j of rank r is sample j*ranks + r. The entries with j*ranks + r >= dataset_len are repeats of the first samples that only fill
the last round; they come last in data-set order and are dropped. The result equals `single_process` on the scores in data-set order for any number of ranks."""


def make(seed):
    g = torch.Generator().manual_seed(seed)
    n, ranks = 13, 4
    scores = (torch.rand(n, generator=g) < 0.5).float()
    scores[:3] = 1.0
    index = list(range(n)); index += index[:(-n) % ranks]
    return {"per_rank": [scores[index[r::ranks]] for r in range(ranks)], "dataset_len": n}


def single_process(scores):
    """Twin: scores of the data set in order."""
    return sum(scores.tolist()) / len(scores)


def right(per_rank, dataset_len):
    gathered = torch.stack(per_rank, 1).flatten()
    return gathered[:dataset_len].mean().item()


if __name__ == "__main__":
    i = make(0)
    scores = [None] * 13
    for r, x in enumerate(i["per_rank"]):
        for j, v in enumerate(x.tolist()):
            scores[(j * 4 + r) % 13] = v
    print(right(**i), "twin", single_process(torch.tensor(scores)), "with the repeats it would be", torch.cat(i["per_rank"]).mean().item())
