"""Dataset is shuffled without a seed in each process. QwenLM/Qwen3-VL#1971, https://github.com/QwenLM/Qwen3-VL/pull/1971, 2026.
The data processor called random.shuffle on the list of samples while building the dataset, in every process and without a seed. The distributed sampler hands
out disjoint indices under the assumption that all ranks have the same order. With different orders samples were trained twice and others never in an epoch."""
import random
import torch

FAMILY = "data stages"
KIND = "seeds"
INPUTS = {"rank": "rank of the process", "step": "step inside the epoch", "data": "the samples as read from disk, the same on all ranks", "process_entropy": "what an unseeded generator starts from in each process, one number per rank"}
SETTINGS = {"world": "4 ranks", "seed": "seed of the sampler, 17"}
NOTES = "The sample that a rank sees at a step. Over one epoch (len(data) / world steps) all ranks together see each sample exactly once."


def make(seed):
    r = random.Random(seed)
    return {"rank": 1, "step": 2, "data": [f"sample{i}" for i in range(24)], "process_entropy": [r.getrandbits(64) for _ in range(4)]}


def sampler_index(rank, step, n, world, seed):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
    return order[rank::world][step]


def load(data, entropy):
    data = list(data)
    random.Random(entropy).shuffle(data)      # random.shuffle(data) in a fresh process
    return data


def broken(rank, step, data, process_entropy, world=4, seed=17):
    data = load(data, process_entropy[rank])
    return data[sampler_index(rank, step, len(data), world, seed)]


def right(rank, step, data, process_entropy, world=4, seed=17):
    return data[sampler_index(rank, step, len(data), world, seed)]


if __name__ == "__main__":
    d = make(0)
    for f in (broken, right):
        seen = [f(r, s, d["data"], d["process_entropy"]) for r in range(4) for s in range(6)]
        print(f.__name__, "distinct samples in an epoch", len(set(seen)), "of", len(seen))
    assert broken(**d) != right(**d) or len(set(seen)) == 24
    assert len({broken(r, s, d["data"], d["process_entropy"]) for r in range(4) for s in range(6)}) < 24 == len(set(seen))
