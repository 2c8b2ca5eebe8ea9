"""Warmup-stable-decay with the 1 - sqrt cooldown (Hägele et al. 2024; torchtitan's decay_type "sqrt", transformers' "1-sqrt"). The rate is flat for most of training and then falls fastest at the BEGINNING of the cooldown, which makes a kink; it ends at the floor, not at zero. The first step has a
rate above 0 because warmup counts from step + 1."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, 0-based; the value is the lr used in this step"}
SETTINGS = {"peak": "highest lr, 3e-4", "warmup": "warmup steps, 100", "total": "all steps, 1000", "cooldown": "steps of the cooldown at the end, 200", "floor": "last lr as a share of the peak, 0.1"}
NOTES = "Linear warmup from peak/warmup at step 0 to peak at step warmup-1, constant, then peak * (floor + (1-floor) * (1 - sqrt(x))) with x the part of the cooldown done; x is 1 at the last step and stays 1 afterwards. Monotone after the warmup."


def make(seed):
    return {"step": [0, 50, 99, 100, 500, 799, 800, 801, 900, 999, 1200][seed % 11]}


def right(step, peak=3e-4, warmup=100, total=1000, cooldown=200, floor=0.1):
    if step < warmup:
        return peak * (step + 1) / warmup
    start = total - cooldown
    if step < start:
        return peak
    x = min(1.0, (step - start + 1) / cooldown)
    return peak * (floor + (1 - floor) * (1 - x ** 0.5))


if __name__ == "__main__":
    v = [right(s) for s in range(1100)]
    print([f"{v[s]:.3g}" for s in (0, 99, 100, 799, 800, 801, 900, 999, 1050)])
    assert v[0] > 0 and v[99] == v[799] == 3e-4 and abs(v[999] - 3e-5) < 1e-12 and v[1050] == v[999]
    assert all(a >= b for a, b in zip(v[99:], v[100:])) and (v[800] - v[801]) > (v[900] - v[901])
