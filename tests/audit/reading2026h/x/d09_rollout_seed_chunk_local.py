"""Rollout seeds from the index inside the worker's chunk. verl-project/verl-omni#561 (fixed in #489), https://github.com/verl-project/verl-omni/issues/561, 2026.
The v1 sync rollout seeds each request from the position of its prompt in the chunk of its agent-loop worker instead of the position in the
batch. With 4 workers and 48 prompts each noise draw is used by 4 prompts of the same batch: 192 seeds instead of 768."""
FAMILY = "sharding"
KIND = "seeds"
INPUTS = {"rank": "index of the rollout worker, 0 to workers-1", "step": "training step, from 0"}
SETTINGS = {"base_seed": "rollout seed, 42", "prompts": "prompts per step over all workers, 12; a multiple of workers", "workers": "rollout workers, 4", "n": "samples per prompt, 4"}
NOTES = ("Returns the seeds of the requests of this worker at this step, prompt by prompt, n for each. Prompts are split over the workers in contiguous chunks. "
         "Each request of a step, and of different steps, has a seed of its own.")


def make(seed):
    return {"rank": 1 + seed % 3, "step": seed}


def broken(rank, step, base_seed=42, prompts=12, workers=4, n=4):
    per_worker = prompts // workers
    chunk = list(range(rank * per_worker, (rank + 1) * per_worker))
    seeds = []
    for i, prompt in enumerate(chunk):
        for j in range(n):
            seeds.append(base_seed + step * prompts * n + i * n + j)
    return seeds


def right(rank, step, base_seed=42, prompts=12, workers=4, n=4):
    per_worker = prompts // workers
    chunk = list(range(rank * per_worker, (rank + 1) * per_worker))
    seeds = []
    for prompt in chunk:
        for j in range(n):
            seeds.append(base_seed + step * prompts * n + prompt * n + j)
    return seeds


if __name__ == "__main__":
    for f in (broken, right):
        print(f.__name__, "distinct seeds in a step:", len({s for r in range(4) for s in f(r, 0)}), "of 48")
    d = make(0)
    assert broken(**d) != right(**d)
    assert len({s for st in range(3) for r in range(4) for s in right(r, st)}) == 144
