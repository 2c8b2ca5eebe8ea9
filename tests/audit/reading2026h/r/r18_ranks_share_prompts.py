"""Ranks get the same prompt, and two steps in a row get the same batch. TRL's RepeatSampler for GRPO: every prompt is
repeated num_generations times in a row, so a group may lie on several ranks (advantages are computed after a gather), and
the whole batch is repeated for num_iterations optimizer steps on the same rollouts. All ranks draw the same permutation
from the same seed and slice it; a seed per rank would tear the groups apart."""
import torch

FAMILY = "data"
KIND = "seeds"
INPUTS = {"rank": "0 ... world-1", "step": "optimizer step, from 0"}
SETTINGS = {"world": "ranks, 4", "per_device": "samples per rank and step, 2", "num_generations": "samples per prompt, 4",
            "num_iterations": "optimizer steps per batch of rollouts, 2", "dataset": "number of prompts, 11", "seed": "42"}
NOTES = ("Returns the list of per_device prompt indices of a rank at a step. world * per_device must be divisible by "
         "num_generations. Each prompt of a batch occurs num_generations times over all ranks; steps 2k and 2k+1 are equal "
         "by intention. The last incomplete batch of an epoch is dropped; a new permutation per epoch.")


def make(seed):
    return {"rank": seed % 4, "step": seed // 4}


def right(rank, step, world=4, per_device=2, num_generations=4, num_iterations=2, dataset=11, seed=42):
    prompts = world * per_device // num_generations
    per_epoch = dataset // prompts
    batch = step // num_iterations
    epoch, k = divmod(batch, per_epoch)
    order = torch.randperm(dataset, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    chosen = order[k * prompts:(k + 1) * prompts]
    everything = [i for i in chosen for _ in range(num_generations)]
    return everything[rank * per_device:(rank + 1) * per_device]


if __name__ == "__main__":
    for s in range(4):
        print(s, [right(r, s) for r in range(4)])
    for e in range(2):
        seen = []
        for s in range(e * 10, e * 10 + 10):
            everything = sum((right(r, s) for r in range(4)), [])
            assert all(everything.count(i) == 4 for i in everything)
            assert everything == sum((right(r, s ^ 1) for r in range(4)), [])
            seen += sorted(set(everything))
        assert len(seen) == 20 and len(set(seen)) == 10
    assert [right(0, s) for s in range(10)] != [right(0, s) for s in range(10, 20)]
