"""Warmup-stable-decay with a 1-sqrt cooldown. The rate stays flat for most of the run and then falls as 1-sqrt(x), with an infinite-looking slope at the start of the cooldown (a sudden drop of 10 % after 1 % of it). This is the recommended shape of Haegele et al. 2024 (arXiv 2405.18392)."""
import math
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step counted from 0"}
SETTINGS = {"peak": "peak rate, 3e-4", "warmup": "linear warmup steps, 20", "total": "steps of the run, 500", "cooldown": "share of the run spent in the cooldown, 0.2"}
NOTES = "Step 0 uses peak/warmup, not 0. The plateau does not depend on total, only the start of the cooldown does. The rate of step total-1 is still positive (small), and from step total on it is exactly 0. Not smooth at the start of the cooldown, on purpose."
def make(seed):
    import random
    return {"step": random.Random(seed).randrange(0, 500)}
def right(step, peak=3e-4, warmup=20, total=500, cooldown=0.2):
    if step < warmup:
        return peak * (step + 1) / warmup
    n = int(total * cooldown)
    start = total - n
    if step < start:
        return peak
    if step >= total:
        return 0.0
    return peak * (1 - math.sqrt((step - start) / n))
if __name__ == "__main__":
    v = [right(s) for s in range(510)]
    assert all(a < b for a, b in zip(v[:19], v[1:20])) and v[19] == 3e-4
    assert set(v[20:401]) == {3e-4} and all(a > b for a, b in zip(v[400:500], v[401:501])) and v[500] == 0
    assert abs(v[401] / 3e-4 - 0.9) < 1e-9 and abs(v[425] / 3e-4 - 0.5) < 1e-9
    print("ok", v[0], v[19], v[400], v[401], v[425], v[499], v[500])
