"""Setting up the resampling iterator after a resume resets the restored RNG. modelscope/ms-swift#9935,
https://github.com/modelscope/ms-swift/pull/9935, 2026. After the checkpoint had restored the RNG state, GRPO/GKD set up the resampling iterator with
set_random_seed(seed + 1) and then set_random_seed(seed). That put the training RNG back to its first position, so a resumed run repeats
the dropout masks and samples of the start instead of going on."""
import torch

FAMILY = "state that is saved, loaded, cached or filled lazily"
KIND = "state"
INPUTS = {
    "checkpoint": "dict: step (updates done so far), rng (the state of the global torch generator when the checkpoint was written)",
    "n_rows": "number of rows of the data set from which the resampling iterator draws",
}
SETTINGS = {"seed": "seed of the run, 42"}
VALUES = {"seed": 42}
NOTES = """Resume of a training process. The global torch generator is the training stream (dropout, sampling); a fresh run seeds it once with `seed`
before step 0. On resume it is set to the saved state and must stand exactly there when training goes on, so that the next draws are those of the
uninterrupted run. The order of the resampling iterator is a stream of its own: the permutation of n_rows with the seed `seed + 1`, the same in a fresh and in a resumed
run; setting it up leaves the training stream where it is. Returned: (order, step); the restored state of the global generator is the other result."""


def make(seed):
    torch.manual_seed(VALUES["seed"])
    for _ in range(7 + seed):
        torch.rand(4, 3)
    return {"checkpoint": {"step": 7 + seed, "rng": torch.get_rng_state()}, "n_rows": 12}


def broken(checkpoint, n_rows, seed=42):
    torch.set_rng_state(checkpoint["rng"])
    torch.manual_seed(seed + 1)
    order = torch.randperm(n_rows).tolist()
    torch.manual_seed(seed)
    return order, checkpoint["step"]


def right(checkpoint, n_rows, seed=42):
    torch.set_rng_state(checkpoint["rng"])
    private = torch.Generator().manual_seed(seed + 1)
    order = torch.randperm(n_rows, generator=private).tolist()
    return order, checkpoint["step"]


if __name__ == "__main__":
    make(0); want = torch.rand(4, 3)
    torch.manual_seed(42); first = torch.rand(4, 3)
    for f in (broken, right):
        order, step = f(**make(0), **VALUES)
        noise = torch.rand(4, 3)
        print(f.__name__, order, "next draw == uninterrupted", bool(torch.equal(noise, want)), "| == first draw of the run", bool(torch.equal(noise, first)))
