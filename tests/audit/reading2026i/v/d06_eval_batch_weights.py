"""Evaluation weighs each batch alike. OpenRLHF/OpenRLHF#1336, https://github.com/OpenRLHF/OpenRLHF/pull/1336, 2026. The
reward model's and DPO's evaluators averaged the means of the batches although the last batch may be smaller. Three pairs
with two right ones in batches of 2 and 1 gave an accuracy of 0.5 instead of 2/3; the loss likewise."""
import torch
import torch.nn.functional as F

FAMILY = "metrics over ranks or micro-batches"
KIND = "metric over ranks"
INPUTS = {"per_rank": "list over ranks; each a list of batches {'chosen': scores [pairs], 'rejected': scores [pairs]}; the last batch of a rank may be shorter"}
SETTINGS = {}
NOTES = ("Accuracy (share of pairs with chosen > rejected) over all pairs of all ranks. The sampler gives every rank the "
         "same number of pairs, so the mean of the ranks' means is exact; batches of a rank may differ in size.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    pairs, size, ranks = 7, 3, 2
    per_rank = []
    for _ in range(ranks):
        chosen, rejected = torch.randn(pairs, generator=g) + 0.4, torch.randn(pairs, generator=g)
        per_rank.append([{"chosen": chosen[i:i + size], "rejected": rejected[i:i + size]} for i in range(0, pairs, size)])
    return {"per_rank": per_rank}


def all_reduce_mean(values):
    return sum(values) / len(values)


def broken(per_rank):
    means = []
    for batches in per_rank:
        acc = 0.0
        for b in batches:
            acc += (b["chosen"] > b["rejected"]).float().mean().item()
        means.append(acc / len(batches))
    return all_reduce_mean(means)


def right(per_rank):
    means = []
    for batches in per_rank:
        correct, count = 0.0, 0
        for b in batches:
            correct += (b["chosen"] > b["rejected"]).float().sum().item()
            count += len(b["chosen"])
        means.append(correct / count)
    return all_reduce_mean(means)


def single_process(per_rank):
    chosen = torch.cat([b["chosen"] for r in per_rank for b in r])
    rejected = torch.cat([b["rejected"] for r in per_rank for b in r])
    return (chosen > rejected).float().mean().item()


if __name__ == "__main__":
    d = make(0)
    print("broken", broken(**d), "right", right(**d), "single process", single_process(**d))
    assert abs(right(**d) - single_process(**d)) < 1e-6 < abs(broken(**d) - right(**d))
