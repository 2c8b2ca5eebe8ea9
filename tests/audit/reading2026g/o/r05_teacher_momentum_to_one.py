"""Momentum of an EMA teacher that ends at exactly 1. The coefficient grows by a cosine from 0.996 to 1.0, so the teacher stops moving at the end, which looks like a frozen-teacher bug; BYOL and DINO both use this schedule."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, counted from 0"}
SETTINGS = {"base": "momentum at step 0, 0.996", "total": "all steps, 500"}
NOTES = ("teacher = m * teacher + (1 - m) * student: m is the weight of the OLD teacher. Increasing in step, m(total) = 1 exactly; DINO builds the table for steps "
         "0 .. total-1, so the last update of the run is tiny but not zero. Past total it stays 1 (clamped; the cosine would come down again).")
import math


def right(step, base=0.996, total=500):
    k = min(step, total)
    return 1.0 - (1.0 - base) * (math.cos(math.pi * k / total) + 1.0) / 2.0


def make(seed):
    import random
    return {"step": random.Random(seed).randrange(500)}


if __name__ == "__main__":
    import torch
    v = [right(s) for s in range(600)]
    assert abs(v[0] - 0.996) < 1e-12 and v[500] == 1.0 and abs(v[250] - 0.998) < 1e-12 and all(a <= b for a, b in zip(v, v[1:]))
    # EMA against the explicit weighted sum of all student values
    torch.manual_seed(0)
    students = torch.randn(501, 4, dtype=torch.float64)
    teacher = students[0].clone()
    for t in range(500):
        teacher = v[t] * teacher + (1 - v[t]) * students[t + 1]
    w = [math.prod(v[:500])] + [(1 - v[t]) * math.prod(v[t + 1:500]) for t in range(500)]
    assert abs(sum(w) - 1) < 1e-9 and torch.allclose(teacher, (torch.tensor(w, dtype=torch.float64)[:, None] * students).sum(0))
    print("m(0)", v[0], "m(499)", v[499], "m(500)", v[500], "weights sum to", sum(w))
