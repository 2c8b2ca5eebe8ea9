"""Batch-size ramp-up is ignored when iterations are turned into samples for the schedule. NVIDIA-NeMo/Megatron-Bridge#2609,
https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/2609, 2026.
The scheduler counts consumed samples. Warmup and decay lengths given in iterations are converted as iterations * global_batch_size, but the first
iterations consume fewer samples. Warmup lasts twice as many iterations as asked and the WSD decay starts late and stops half way."""

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "training iteration, from 0"}
SETTINGS = {
    "lr": "peak, 3e-4", "train_iters": "iterations of the run, 100", "global_batch_size": "final batch, 16",
    "rampup": "start batch 8, increment 8, ramp over 160 samples", "warmup_iters": "10", "wsd_decay_iters": "last iterations with linear decay to 0, 20",
}
NOTES = "Warmup-stable-decay, linear warmup and linear decay to 0 at train_iters; lengths are meant in iterations, the scheduler itself counts samples."


def _consumed(iters, gbs, rampup):
    start, inc, over = rampup
    steps = (gbs - start) // inc
    per = over / max(steps, 1)
    used = 0
    for _ in range(iters):
        used += min(gbs, start + inc * int(used // per)) if used < over else gbs
    return used


def _wsd(samples, lr, warmup, end, decay):
    if samples < warmup:
        return lr * samples / warmup
    begin = end - decay
    if samples <= begin:
        return lr
    return lr * max(0.0, 1 - (samples - begin) / decay)


def broken(step, lr=3e-4, train_iters=100, global_batch_size=16, rampup=(8, 8, 160), warmup_iters=10, wsd_decay_iters=20):
    g = global_batch_size
    now = _consumed(step, g, rampup)
    return _wsd(now, lr, warmup_iters * g, train_iters * g, wsd_decay_iters * g)


def right(step, lr=3e-4, train_iters=100, global_batch_size=16, rampup=(8, 8, 160), warmup_iters=10, wsd_decay_iters=20):
    g = global_batch_size
    at = lambda n: _consumed(n, g, rampup)
    return _wsd(at(step), lr, at(warmup_iters), at(train_iters), at(train_iters) - at(train_iters - wsd_decay_iters))


def make(seed):
    return {"step": 8 + seed}


if __name__ == "__main__":
    for s in (0, 5, 10, 15, 20, 50, 80, 85, 90, 95, 99, 100):
        print(s, broken(s), right(s))
    assert broken(**make(0)) != right(**make(0)) and right(100) == 0 < broken(100)
