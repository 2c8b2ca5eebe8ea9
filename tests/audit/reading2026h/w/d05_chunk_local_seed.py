"""Rollout seeds from the index inside the worker's chunk. verl-project/verl-omni#561, https://github.com/verl-project/verl-omni/issues/561, 2026.
Each rollout request is seeded from base seed, step and the index of its prompt. The batch is cut into one chunk per agent-loop worker, and the new trainer counted the prompts from 0 within each chunk.
Every worker so draws the same noise for its prompts: 4 workers, each noise value used by 4 prompts of the same step, and a run that was stable before diverged."""
import torch

FAMILY = "sharding"
KIND = "seeds"
INPUTS = {"rank": "index of the rollout worker", "step": "training step"}
SETTINGS = {"workers": "4", "prompts_per_worker": "prompts in a worker's chunk, 12", "rollouts": "rollouts per prompt (group size), 4", "base_seed": "42"}
NOTES = "Returns the list of seeds of all rollout requests of this worker in this step, prompt-major. All requests of one step over all workers must have different seeds; a (rank, step) pair must always give the same seeds; steps differ."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"rank": int(torch.randint(1, 4, (1,), generator=g)), "step": int(torch.randint(0, 100, (1,), generator=g))}


def _seed(base_seed, step, index, rollout, total, rollouts):
    return (base_seed + (step * total + index) * rollouts + rollout) % (2 ** 31)


def broken(rank, step, workers=4, prompts_per_worker=12, rollouts=4, base_seed=42):
    total = workers * prompts_per_worker
    chunk = range(rank * prompts_per_worker, (rank + 1) * prompts_per_worker)
    return [_seed(base_seed, step, i, r, total, rollouts) for i, _ in enumerate(chunk) for r in range(rollouts)]


def right(rank, step, workers=4, prompts_per_worker=12, rollouts=4, base_seed=42):
    total = workers * prompts_per_worker
    chunk = range(rank * prompts_per_worker, (rank + 1) * prompts_per_worker)
    return [_seed(base_seed, step, i, r, total, rollouts) for i in chunk for r in range(rollouts)]


if __name__ == "__main__":
    d = make(0)
    print(d, "equal seeds of broken and right:", len(set(broken(**d)) & set(right(**d))))
    for f in (broken, right):
        seeds = [s for rank in range(4) for s in f(rank, d["step"])]
        print(f.__name__, "requests", len(seeds), "different seeds", len(set(seeds)))
    assert broken(**d) != right(**d)
    assert len({s for rank in range(4) for step in range(5) for s in right(rank, step)}) == 4 * 48 * 5
