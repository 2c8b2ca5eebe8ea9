"""Sequence-length curriculum in stairs. DeepSpeed's fixed_root schedule grows the length with the square root of the step and rounds DOWN to a multiple of 8 (tensor cores), so the length stands still for many steps and the early tokens per step are few."""
import math
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step counted from 0"}
SETTINGS = {"low": "first length, 64", "high": "last length, 1024", "ramp": "steps until the last length, 1000", "multiple": "lengths are multiples of this, 8", "degree": "root degree, 2"}
NOTES = "Returns a sequence length as float (integral value). Rows are truncated to it, the dropped tokens are lost. low and high must be multiples of `multiple`. Piecewise constant, non-decreasing, exactly high from step ramp on."
def make(seed):
    import random
    return {"step": random.Random(seed).randrange(0, 1200)}
def right(step, low=64, high=1024, ramp=1000, multiple=8, degree=2):
    if step >= ramp:
        return float(high)
    raw = math.floor((step / ramp) ** (1.0 / degree) * (high - low) + low)
    raw -= raw % multiple
    return float(min(raw, high))
if __name__ == "__main__":
    v = [right(s) for s in range(1300)]
    assert v[0] == 64 and v[1000] == v[1299] == 1024 and all(x % 8 == 0 for x in v) and all(a <= b for a, b in zip(v, v[1:]))
    assert v[250] == 544 and len(set(v)) < 122
    for s in range(1000):
        e = 64 + 960 * math.sqrt(s / 1000)
        assert v[s] <= e + 1e-9 and e - v[s] < 9
    print("ok", v[0], v[1], v[10], v[250], v[999], v[1000], "stairs", len(set(v)))
