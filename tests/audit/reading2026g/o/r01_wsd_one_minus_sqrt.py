"""WSD with a 1-sqrt cooldown. The rate is flat for most of the run and then falls with an infinite slope at first (1 - sqrt(x)), which looks like a swapped formula beside cosine or linear; Haegele et al. 2024 ("Scaling laws and compute-optimal training beyond fixed training durations") found it better than linear."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, counted from 0"}
SETTINGS = {"peak": "peak learning rate, 3e-4", "warmup": "linear warmup steps, 100", "total": "all steps, 1000", "cooldown": "last steps in which the rate falls, 200"}
NOTES = ("Warmup uses step + 1, so no step has rate 0 within the run and step warmup-1 is at the peak. Constant until total - cooldown (that step "
         "is still at the peak). The last step of the run (total-1) is slightly above 0; from total on it is exactly 0. Needs warmup + cooldown <= total.")
import math


def right(step, peak=3e-4, warmup=100, total=1000, cooldown=200):
    start = total - cooldown
    if step < warmup:
        return peak * (step + 1) / warmup
    if step < start:
        return peak
    x = min(1.0, (step - start) / cooldown)
    return peak * (1.0 - math.sqrt(x))


def make(seed):
    import random
    return {"step": random.Random(seed).randrange(1000)}


if __name__ == "__main__":
    v = [right(s) for s in range(1001)]
    assert abs(v[0] - 3e-6) < 1e-12 and v[99] == v[500] == v[800] == 3e-4 and v[1000] == 0 and 0 < v[999] < 1e-6
    assert all(a >= b for a, b in zip(v[99:], v[100:]))
    assert abs(v[850] - 1.5e-4) < 1e-12     # a quarter of the cooldown: half of the peak
    assert 0 <= right(make(3)["step"]) <= 3e-4 and right(5000) == 0
    print("first", v[0], "quarter of cooldown", v[850], "last", v[999], "after", v[1000])
