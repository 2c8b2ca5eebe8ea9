"""Warmup-stable-decay with a 1 - sqrt cool-down to zero. Hägele et al. 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations".
The decay falls steeply right at its start (infinite slope) and flattens out: after a quarter of the cool-down the rate is already halved. Warm-up counts from 1, so that step 0 does not run with a rate of zero; the rate of the last step is small but not zero."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "index of the optimizer step, from 0"}
SETTINGS = {"lr": "peak, 1e-3", "warmup": "warm-up steps, 10", "total": "steps of the run, 200", "cooldown": "steps of the cool-down at the end, 40"}
NOTES = "Learning rate of step `step`. Warm-up: lr * (step + 1) / warmup. Then constant. In the last `cooldown` steps lr * (1 - sqrt(k / cooldown)) with k = step - (total - cooldown), so its first step (k = 0) still has the full rate. 0 at and after total. Not a function of the number of ranks."


def make(seed):
    return {"step": list(range(205))}


def right(step, lr=1e-3, warmup=10, total=200, cooldown=40):
    if step < warmup:
        return lr * (step + 1) / warmup
    k = step - (total - cooldown)
    if k <= 0:
        return lr
    if step >= total:
        return 0.0
    return lr * (1 - (k / cooldown) ** 0.5)


if __name__ == "__main__":
    v = [right(s) for s in make(0)["step"]]
    print(v[0], v[9], v[10], v[160], v[170], v[199], v[200])
    assert v[0] == 1e-4 and v[9] == v[160] == 1e-3 and abs(v[170] - 5e-4) < 1e-9 and 0 < v[199] < 2e-5 and v[200] == 0
    assert all(a >= b for a, b in zip(v[10:], v[11:]))
