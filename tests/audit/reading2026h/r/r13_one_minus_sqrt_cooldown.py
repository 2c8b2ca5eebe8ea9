"""Learning rate drops by a fifth within the first few steps of the cooldown. Warmup-stable-decay with the 1-sqrt cooldown
(Haegele et al., arXiv 2405.18392): rate = peak * (1 - sqrt(fraction of the cooldown done)). The slope is infinite at the
start of the cooldown, so the curve has a sharp corner after a long flat part, and it is right that it falls fastest first."""
import math

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, 0 ... total (total itself gives 0)"}
SETTINGS = {"peak": "peak learning rate, 6e-4", "warmup": "linear warmup, 20 steps, from peak/20 at step 0",
            "total": "training steps, 400", "decay_fraction": "length of the cooldown as a part of total, 0.2"}
NOTES = ("Linear warmup (step 0 has peak/warmup, not 0), then constant, then 1-sqrt cooldown over the last "
         "decay_fraction * total steps to exactly 0 at step = total. Never rises after the warmup.")


def make(seed):
    return {"step": 330 + seed % 70}


def right(step, peak=6e-4, warmup=20, total=400, decay_fraction=0.2):
    decay = int(round(decay_fraction * total))
    start = total - decay
    if step < warmup:
        return peak * (step + 1) / warmup
    if step < start:
        return peak
    return peak * (1 - math.sqrt(min(step - start, decay) / decay))


if __name__ == "__main__":
    print([(t, round(right(t) / 6e-4, 4)) for t in (0, 19, 20, 319, 320, 321, 324, 340, 399, 400)])
    rates = [right(t) for t in range(401)]
    assert max(rates) == 6e-4 and rates[400] == 0 and rates[320] == 6e-4
    assert all(a >= b for a, b in zip(rates[20:], rates[21:]))
    assert abs(rates[340] - 6e-4 * (1 - 20 ** 0.5 / 80 ** 0.5)) < 1e-12
