"""Warmup, stable, 1 - sqrt cooldown, and a second warmup after a branch. The run was stopped in its stable phase and branched: the schedule goes back up from a third of the peak for a few steps after the branch (the optimizer
state was not kept), then holds and cools down with 1 - sqrt, which drops fast first. The learning rate is not monotone after the warmup, does not reach zero, and the first step is not at zero."""
import math

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, from 0"}
SETTINGS = {"peak": "1e-3", "warmup": "10 steps, the first step already has peak / 10", "branch": "step 40: rewarm from peak / 3 over 6 steps", "cooldown": "last 20 steps of 100", "floor": "5 percent of the peak at the end"}
NOTES = "Piecewise: (step + 1) / warmup up to the peak; constant; at the branch peak * (1/3 + 2/3 * k / 6) for k = 0..6; constant; then floor + (peak - floor) * (1 - sqrt(x)), x from 0 to 1 over the cooldown, 1 at the last step."


def make(seed):
    return {"step": [0, 5, 9, 39, 40, 43, 46, 79, 80, 90, 99][seed % 11]}


def right(step, peak=1e-3, warmup=10, branch=40, rewarm=6, cooldown=20, total=100, floor=0.05):
    if step < warmup:
        return peak * (step + 1) / warmup
    if branch <= step < branch + rewarm:
        return peak * (1 / 3 + 2 / 3 * (step - branch) / rewarm)
    x = max(0.0, (step - (total - cooldown)) / (cooldown - 1))
    return peak * (floor + (1 - floor) * (1 - math.sqrt(x)))


if __name__ == "__main__":
    table = [right(s) for s in range(100)]
    want = [1e-3 * (s + 1) / 10 for s in range(10)] + [1e-3] * 30 + [1e-3 * (2 + 4 * k / 6) / 6 for k in range(6)] + [1e-3] * 34
    want += [5e-5 + 9.5e-4 * (1 - (k / 19) ** 0.5) for k in range(20)]
    print([round(table[s] * 1e3, 3) for s in (0, 9, 39, 40, 43, 46, 80, 81, 90, 99)])
    assert max(abs(a - b) for a, b in zip(table, want)) < 1e-12 and len(want) == 100
