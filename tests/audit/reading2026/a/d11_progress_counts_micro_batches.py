"""Progress of the schedule counts micro-batches. karpathy/nanochat#775 (also #816),
https://github.com/karpathy/nanochat/pull/775, 2026. --num-iterations is a number of optimizer steps, but the SFT loader
counts each micro-batch it yields and divides that by num_iterations. With gradient accumulation the learning rate runs
through its warm-down grad_accum times too fast, and as nothing is clamped it goes below zero."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, from 0"}
SETTINGS = {"num_iterations": "optimizer steps of the run, 64", "grad_accum": "micro-batches per optimizer step, 2",
            "warmdown": "share of the run in which the rate falls linearly to 0, the last 0.5"}
NOTES = ("Multiplier of the learning rate at an optimizer step: 1 in the first half, then linear to 0 at the last step. "
         "The loader is one micro-batch ahead (it prefetches the next one).")

def make(seed):
    return {"step": 20 + seed}

def _multiplier(progress, warmdown):
    return 1.0 if progress < 1 - warmdown else 1.0 - (progress - (1 - warmdown)) / warmdown

def broken(step, num_iterations=64, grad_accum=2, warmdown=0.5):
    it = (step + 1) * grad_accum + 1                   # micro-batches that the loader has yielded
    return _multiplier(it / num_iterations, warmdown)

def right(step, num_iterations=64, grad_accum=2, warmdown=0.5):
    it = (step + 1) * grad_accum + 1
    return _multiplier((it // grad_accum) / num_iterations, warmdown)

if __name__ == "__main__":
    steps = (0, 14, 20, 40, 63)
    print([(s, round(broken(s), 3), round(right(s), 3)) for s in steps])
    assert abs(broken(**make(0)) - right(**make(0))) > 0.1 and right(63) == 0.0
