"""Warmup, constant, then a 1 - sqrt cooldown. Hägele et al. 2024 (arXiv 2405.18392) found that after a constant phase
the cooldown lr = peak * (1 - sqrt(progress)) beats the cosine. It drops steeply at once (its slope is infinite at the
start) and reaches zero at the end of training; the rate is flat for most of the run."""
import math

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, from 0"}
SETTINGS = {"peak": "peak learning rate, 1e-3", "warmup": "warmup steps, 20", "total": "steps of the run, 200", "cooldown": "cooldown steps, 40"}
NOTES = ("Linear warmup that is peak/warmup at step 0 (never 0) and peak at step warmup-1; constant until total - cooldown; "
         "then 1 - sqrt. 0 from step total on. The first cooldown steps fall fast on purpose.")


def make(seed):
    return {"step": 160 + seed % 40, "peak": 1e-3, "warmup": 20, "total": 200, "cooldown": 40}


def right(step, peak=1e-3, warmup=20, total=200, cooldown=40):
    if step < warmup:
        return peak * (step + 1) / warmup
    if step < total - cooldown:
        return peak
    progress = min(1.0, (step - (total - cooldown)) / cooldown)
    return peak * (1 - math.sqrt(progress))


if __name__ == "__main__":
    values = [right(s) for s in range(210)]
    print([(s, round(values[s] * 1e3, 4)) for s in (0, 19, 20, 159, 160, 161, 170, 180, 199, 200, 209)])
    assert values[0] == 5e-5 and abs(values[19] - 1e-3) < 1e-12 and set(values[20:161]) == {1e-3}
    assert all(a >= b for a, b in zip(values[20:], values[21:])) and values[200] == values[209] == 0
    assert abs(values[170] - 1e-3 * 0.5) < 1e-12
