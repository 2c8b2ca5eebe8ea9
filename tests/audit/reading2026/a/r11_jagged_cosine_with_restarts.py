"""Jagged cosine: at each merge of the low-rank adapter the rate drops to 0 and is warmed up again within a few steps.
Each restart also resets the optimizer state (not part of this function), hence the short ramp; after the ramp the rate
returns to the same long cosine as before, not to the peak. So the curve has deep, narrow notches at fixed intervals."""
import math
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, from 0"}
SETTINGS = {"peak": "peak, 1e-3", "total": "steps, 1000", "warmup": "first warm-up, 50 steps", "every": "restart every 200 steps",
            "ramp": "re-warm-up, 10 steps", "floor": "share of the peak at the end, 0.1"}
NOTES = "Learning rate. The notches to 0 are intended; the envelope is one cosine over the whole run."

def make(seed):
    return {"step": 400 + seed}

def right(step, peak=1e-3, total=1000, warmup=50, every=200, ramp=10, floor=0.1):
    if step < warmup:
        return peak * step / warmup
    x = (step - warmup) / (total - warmup)
    envelope = peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * x)))
    since = step % every
    return envelope * since / ramp if step >= every and since < ramp else envelope

if __name__ == "__main__":
    rates = [right(s) for s in range(1001)]
    print([(s, round(rates[s], 6)) for s in (0, 50, 199, 200, 205, 210, 400, 410, 999, 1000)])
    assert rates[200] == rates[400] == 0 and abs(rates[205] - 0.5 * right(205, ramp=1)) < 1e-9
    smooth = [rates[s] for s in range(50, 1000) if s < 200 or s % 200 >= 10]
    assert all(a >= b for a, b in zip(smooth, smooth[1:])) and abs(right(1000, every=10**6) - 1e-4) < 1e-9
