"""Adafactor's growing beta2. The second-moment decay is 1 - t^-0.8 with t from 1: exactly 0 at the first step, so the running average starts from the first square itself and needs no bias correction (Shazeer & Stern 2018, section 7.2)."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step counted from 0 (t = step + 1)"}
SETTINGS = {"power": "exponent of the decay, 0.8", "offset": "steps subtracted when fine-tuning restarts the clock, 0"}
NOTES = "Returns beta2, not a rate. 0.0 at the first step, rises towards 1 for ever and never reaches it; no `total`. The averages made with it are convex combinations with weights that sum to 1 at each step, so Adam's division by 1-beta2^t would be wrong here. offset must not exceed step."
def make(seed):
    import random
    return {"step": random.Random(seed).randrange(0, 10000)}
def right(step, power=0.8, offset=0):
    t = step - offset + 1
    return 1.0 - t ** -power
if __name__ == "__main__":
    import random
    v = [right(s) for s in range(2000)]
    assert v[0] == 0.0 and all(a < b < 1 for a, b in zip(v, v[1:])) and right(100, offset=100) == 0.0
    weights = []                          # explicit weights of each past square
    g2 = [random.Random(1).random() for _ in range(2000)]
    avg = 0.0
    for b, x in zip(v, g2):
        avg = b * avg + (1 - b) * x
        weights = [w * b for w in weights] + [1 - b]
    assert abs(sum(weights) - 1) < 1e-9 and abs(avg - sum(w * x for w, x in zip(weights, g2))) < 1e-9
    print("ok", v[0], v[1], v[9], v[999], "sum of weights", sum(weights))
