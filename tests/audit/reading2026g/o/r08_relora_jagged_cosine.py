"""Jagged cosine of ReLoRA. At each merge of the adapters the rate drops to exactly 0 and climbs back in a few steps to the *one* global cosine (not to the peak, unlike SGDR), since the optimizer state was just reset; Lialin et al. 2023, "ReLoRA"."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, counted from 0"}
SETTINGS = {"peak": "peak learning rate, 1e-3", "warmup": "first warmup, 50 steps", "total": "all steps, 1000", "every": "steps between restarts, 200", "rewarm": "warmup steps after a restart, 20", "floor": "lowest share of the peak that the cosine reaches, 0.1"}
NOTES = ("Not monotone. Rate 0 at step 0 and at 200, 400, 600, 800. The ramp after a restart leads to the cosine's value at the END of that ramp, so it meets the envelope without a kink upward. "
         "The envelope is one cosine over the whole run and does not restart. Needs rewarm < every and warmup <= every. At total (= a multiple of every) the run is over; the function returns the floor from there.")
import math


def envelope(step, warmup, total, floor):
    x = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * x))


def right(step, peak=1e-3, warmup=50, total=1000, every=200, rewarm=20, floor=0.1):
    if step >= total:
        return peak * floor
    if step < warmup:
        return peak * step / warmup
    inside = step % every
    if step >= every and inside < rewarm:
        end = step - inside + rewarm
        return peak * inside / rewarm * envelope(end, warmup, total, floor)
    return peak * envelope(step, warmup, total, floor)


def make(seed):
    import random
    return {"step": random.Random(seed).randrange(1000)}


if __name__ == "__main__":
    v = [right(s) for s in range(1001)]
    assert [s for s in range(1001) if v[s] == 0] == [0, 200, 400, 600, 800]
    assert v[50] == 1e-3 == max(v) and abs(v[1000] - 1e-4) < 1e-12
    for r in (200, 400, 600, 800):
        top = 1e-3 * (0.1 + 0.45 * (1 + math.cos(math.pi * (r + 20 - 50) / 950)))
        assert abs(v[r + 20] - top) < 1e-12
        for i in range(20):
            assert abs(v[r + i] - top * i / 20) < 1e-12
        assert v[r + 20] < v[r - 1]         # back to the envelope, not to the peak
    print("around the second restart", [round(v[s] * 1e3, 4) for s in (399, 400, 401, 410, 419, 420, 421)])
