"""Mid-epoch resume skips batches of another permutation. wyim-pgl/transgenic#59 (a training script on accelerate), https://github.com/wyim-pgl/transgenic/issues/59, 2026.
The shuffling loader draws its permutation from the global RNG when the iterator is made. On resume the checkpoint's RNG state is the one of the middle of the epoch, so the loader draws another permutation, and the first resume_step entries of that one are skipped.
Some samples of the epoch are seen twice and as many never. The right code derives the permutation from (seed, epoch) with its own generator."""
import torch
FAMILY = "data"
KIND = "state"
INPUTS = {"n": "number of samples", "resume_step": "samples consumed before the interruption (batch size 1)", "seed": "seed of the run"}
SETTINGS = {}
NOTES = "Returns the sample ids that one epoch with an interruption sees, in order: the part before the checkpoint and the part after the resume. Each training step draws from the global RNG as well (dropout). The checkpoint holds the global RNG state and the step. Every sample must be seen exactly once in the epoch. Touches the global torch RNG."


def make(seed):
    return {"n": 64, "resume_step": 20, "seed": seed}


def _train(order, start, stop):
    seen = []
    for step, i in enumerate(order):
        if step < start:
            continue
        if step == stop:
            break
        torch.rand(4)                      # dropout of the training step
        seen.append(i)
    return seen


def broken(n, resume_step, seed):
    torch.manual_seed(seed)
    seen = _train(torch.randperm(n).tolist(), 0, resume_step)
    ckpt = {"rng": torch.get_rng_state(), "step": resume_step}

    torch.manual_seed(seed)                # the new process
    torch.set_rng_state(ckpt["rng"])
    return seen + _train(torch.randperm(n).tolist(), ckpt["step"], n)


def right(n, resume_step, seed):
    def order(epoch):
        return torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    torch.manual_seed(seed)
    seen = _train(order(0), 0, resume_step)
    ckpt = {"rng": torch.get_rng_state(), "step": resume_step, "epoch": 0}

    torch.manual_seed(seed)
    torch.set_rng_state(ckpt["rng"])
    return seen + _train(order(ckpt["epoch"]), ckpt["step"], n)


if __name__ == "__main__":
    d = make(0)
    for f in (broken, right):
        s = f(**d)
        print(f.__name__, "seen", len(s), "different", len(set(s)), "never seen", d["n"] - len(set(s)))
        assert (len(set(s)) == d["n"]) == (f is right)
