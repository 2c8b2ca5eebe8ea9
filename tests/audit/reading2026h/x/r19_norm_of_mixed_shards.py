"""Gradient norm over ranks with split and replicated parameters (Megatron-LM clip_grads: shared and tensor-parallel duplicates are skipped).
The squares of split parameters are added over all ranks. Replicated parameters (norms, biases of row-parallel layers) have the same gradient on each rank and are counted on
rank 0 only; the other ranks leave them out. The root is taken once, after the sum. So ranks contribute different sets of names."""
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "per rank a dict: split (dict of names and local gradient shards), replicated (dict of names and gradients, equal on all ranks), rank (its number)"}
SETTINGS = {}
NOTES = "2-norm of the gradient of the whole model. The first rank is rank 0. Shards are cut along dimension 0 and may be uneven or empty. `twin` puts the whole gradient together."
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    full = {"w1": torch.randn(7, 4, generator=g), "w2": torch.randn(2, 5, generator=g)}
    rep = {"norm": torch.randn(6, generator=g) * 2, "bias": torch.randn(3, generator=g)}
    return {"ranks": [{"split": {k: v.tensor_split(3)[r] for k, v in full.items()}, "replicated": {k: v.clone() for k, v in rep.items()}, "rank": r} for r in range(3)]}


def right(ranks):
    total = 0.0
    for r in ranks:
        mine = list(r["split"].values())
        if r["rank"] == 0:
            mine += list(r["replicated"].values())
        total += sum(x.float().pow(2).sum().item() for x in mine)        # all-reduce, sum
    return total ** 0.5


def twin(ranks):
    whole = [torch.cat([r["split"][k] for r in ranks]).flatten() for k in ranks[0]["split"]]
    whole += [v.flatten() for v in ranks[0]["replicated"].values()]
    return torch.cat(whole).norm().item()


if __name__ == "__main__":
    d = make(0)["ranks"]
    print(right(d), twin(d), [tuple(v.shape) for v in d[2]["split"].values()])
    assert abs(right(d) - twin(d)) < 1e-5
