"""Accuracy over ranks with the sampler's padding removed (accelerate gather_for_metrics, DistributedSampler drop_last=False): the sampler repeats the first examples so that all ranks have the same number; rank r holds examples r, r + world, …. After the gather the list is interleaved and cut to the size of the data set, so that repeated examples are not
counted twice. Throwing away the tail of the gathered list looks like lost data."""
import torch

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "list over ranks of {'predictions': [n], 'labels': [n]}; equal n on all ranks; example j of rank r is number j * world + r, modulo the size of the data", "size": "number of examples in the data set"}
SETTINGS = {}
NOTES = "Share of right predictions over the data set, each example once. size <= n * world < size + world. single_process is the twin on the data set itself."


def make(seed, size=10, world=4):
    g = torch.Generator().manual_seed(seed)
    predictions, labels = torch.randint(0, 3, (size,), generator=g), torch.randint(0, 3, (size,), generator=g)
    each = -(-size // world)
    index = [[(j * world + r) % size for j in range(each)] for r in range(world)]
    return {"ranks": [{"predictions": predictions[i], "labels": labels[i]} for i in map(torch.tensor, index)], "size": size}


def right(ranks, size):
    predictions = torch.stack([r["predictions"] for r in ranks], dim=1).flatten()[:size]
    labels = torch.stack([r["labels"] for r in ranks], dim=1).flatten()[:size]
    return (predictions == labels).float().mean().item()


def single_process(ranks, size):
    seen = {}
    for r, rank in enumerate(ranks):
        for j, (p, l) in enumerate(zip(rank["predictions"].tolist(), rank["labels"].tolist())):
            seen[(j * len(ranks) + r) % size] = p == l
    return sum(seen.values()) / len(seen)


if __name__ == "__main__":
    for seed in range(6):
        d = make(seed, size=10 + seed)
        assert abs(right(**d) - single_process(**d)) < 1e-6
    print("accuracy", right(**make(0)), single_process(**make(0)))
