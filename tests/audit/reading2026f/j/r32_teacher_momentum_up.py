"""DINO/BYOL teacher momentum: a cosine schedule that goes UP, from 0.996 to exactly 1, so the teacher freezes at the end. A moving average whose rate ends at one looks broken; it is what BYOL and DINO use (Grill et al. 2020; Caron et al. 2021)."""
import math

FAMILY = "moving averages"
KIND = "schedule"
INPUTS = {"step": "optimizer step from 0"}
SETTINGS = {"base": "momentum at step 0, 0.996", "total": "steps of the run, 1000"}
NOTES = "Returns the momentum m in teacher = m * teacher + (1 - m) * student. Never decreases; 1.0 at and after the last step."


def make(seed):
    return {"step": seed * 37 % 1000}


def right(step, base=0.996, total=1000):
    return 1 - (1 - base) * (math.cos(math.pi * min(step, total) / total) + 1) / 2


if __name__ == "__main__":
    v = [right(s) for s in range(1200)]
    assert abs(v[0] - 0.996) < 1e-12 and v[1000] == v[1199] == 1.0 and all(a <= b for a, b in zip(v, v[1:]))
    assert abs(v[500] - 0.998) < 1e-9
    t, s = 0.0, 1.0                       # teacher follows a constant student
    for m in v[:1000]:
        t = m * t + (1 - m) * s
    want = 1 - math.exp(sum(math.log(m) for m in v[:1000]))
    assert abs(t - want) < 1e-9
    print("ok", v[0], v[500], v[1000], "teacher", t)
