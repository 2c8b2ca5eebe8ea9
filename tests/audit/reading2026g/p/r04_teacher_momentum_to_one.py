"""Teacher momentum that rises to exactly 1. In BYOL and DINO the teacher's EMA coefficient follows an upside-down cosine from 0.996 to 1.0, so the teacher freezes at the end of the run; a momentum of 1 is the designed end point."""
import math
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step counted from 0"}
SETTINGS = {"base": "momentum at step 0, 0.996", "total": "steps of the run, 400"}
NOTES = "Returns the weight of the OLD teacher: teacher = m*teacher + (1-m)*student. Rises monotonically from base to 1.0 at step `total`; clamped at 1.0 after it (teacher frozen). No warmup."
def make(seed):
    import random
    return {"step": random.Random(seed).randrange(0, 401)}
def right(step, base=0.996, total=400):
    x = min(step / total, 1.0)
    return 1 - (1 - base) * (math.cos(math.pi * x) + 1) / 2
if __name__ == "__main__":
    v = [right(s) for s in range(420)]
    assert abs(v[0] - 0.996) < 1e-12 and v[400] == 1.0 and v[419] == 1.0 and max(v) <= 1.0
    assert all(a < b for a, b in zip(v[:399], v[1:400])) and abs(v[200] - 0.998) < 1e-12
    t, s = 0.0, 1.0           # the teacher still gets near a constant student
    for m in v[:400]:
        t = m * t + (1 - m) * s
    prod = math.prod(v[:400])
    assert abs(t - (1 - prod)) < 1e-12
    print("ok", v[0], v[200], v[400], "teacher", t)
