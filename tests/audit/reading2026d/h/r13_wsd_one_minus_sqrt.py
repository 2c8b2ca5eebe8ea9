"""Warmup-stable-decay with a 1 - sqrt cooldown, and the warmup starts at 1/warmup instead of 0.
The rate is constant for most of the run and drops steeply at the START of the cooldown (Hägele et al. 2024; MiniCPM). The first step (step 0) has a non-zero rate since the schedule is read before the update, and the step `total` has rate 0."""
FAMILY = "schedule"
KIND = "schedule"
INPUTS = {"step": "0-based optimizer step"}
SETTINGS = {"peak": "3e-4", "warmup": "warmup steps, 10", "decay": "cooldown steps, 20", "total": "all steps, 100"}
NOTES = "Not cosine. Continuous at both joints. Beyond total stays 0."
def make(seed): return {"step": seed % 120}
def right(step, peak=3e-4, warmup=10, decay=20, total=100):
    if step < warmup: return peak * (step + 1) / warmup
    if step < total - decay: return peak
    if step >= total: return 0.0
    return peak * (1 - ((step - (total - decay)) / decay) ** 0.5)
if __name__ == "__main__":
    v = [right(s) for s in range(110)]
    assert abs(v[0] - 3e-5) < 1e-15 and v[9] == v[10] == v[79] == v[80] == 3e-4 and v[100] == 0 and v[99] > 0
    assert all(a >= b for a, b in zip(v[9:], v[10:])) and (v[80] - v[81]) > (v[98] - v[99])
    assert abs(v[85] - 3e-4 * 0.5) < 1e-12
    print([round(x / 3e-4, 3) for x in v[::6]])
