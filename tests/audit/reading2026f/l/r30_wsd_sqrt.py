"""Warmup-stable-decay with the 1 - sqrt cooldown (Haegele et al. 2024). The rate is constant for most of the run, falls STEEPLY at the beginning of
the cooldown, and would be exactly zero at step = total, one after the last; warmup counts from step + 1 so the first step is not lost."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer steps done before this one, from 0"}
SETTINGS = {"peak": "highest rate, 3e-4", "warmup": "warmup steps, 10", "total": "steps of the run, 100", "cooldown": "share of the run that cools down, 0.2"}
NOTES = ("Returns the learning rate of the step. Not smooth at the start of the cooldown by design; rate is 0 from step = total on. Before warmup ends "
         "the rate is peak * (step + 1) / warmup.")
import math


def make(seed):
    return {"step": [0, 9, 10, 79, 80, 81, 99, 100, 120][seed % 9]}


def right(step, peak=3e-4, warmup=10, total=100, cooldown=0.2):
    if step < warmup:
        return peak * (step + 1) / warmup
    first = total - int(round(total * cooldown))
    if step < first:
        return peak
    done = min(1.0, (step - first) / max(1, total - first))
    return peak * (1.0 - math.sqrt(done))


if __name__ == "__main__":
    lrs = [right(s) for s in range(101)]
    assert abs(lrs[0] - 3e-5) < 1e-12 and abs(lrs[9] - 3e-4) < 1e-12 and lrs[79] == 3e-4 and lrs[80] == 3e-4 and lrs[100] == 0.0
    assert all(a >= b for a, b in zip(lrs[10:], lrs[11:]))
    drops = [a - b for a, b in zip(lrs[80:], lrs[81:])]
    print("first drop %.2e, second %.2e, last %.2e" % (drops[0], drops[1], drops[-1]))
    for s in range(80, 101):
        assert abs(lrs[s] - 3e-4 * (1 - ((s - 80) / 20) ** 0.5)) < 1e-12
