"""Right: the decay of the weight average is computed from a half-life in rows that is capped by a share of the rows seen, so the decay is 0 on the first update (the average copies the weights) and depends on the batch size. A constant such as 0.9999 appears nowhere."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "index of the update, 0, 1, ..."}
SETTINGS = {"half_life": "half-life of the average in rows, 5000", "ramp": "largest half-life as a share of the rows seen, 0.05", "batch": "rows per update, 32"}
NOTES = "Decay of the exponential moving average of the weights for this update: average = decay * average + (1 - decay) * weights. decay = 0.5 ** (batch / min(half_life, ramp * rows seen before)); 0 at the first update."

def make(seed):
    return {"step": 100 + seed}

def right(step, half_life=5000, ramp=0.05, batch=32):
    half = min(half_life, ramp * step * batch)
    return 0.5 ** (batch / max(half, 1e-8))

def slow(step, half_life=5000, ramp=0.05, batch=32):
    """Row by row: the factor of one row to the power of the batch."""
    half = min(half_life, ramp * sum(batch for _ in range(step)))
    if half == 0:
        return 0.0
    factor, per_row = 1.0, 0.5 ** (1 / half)
    for _ in range(batch):
        factor *= per_row
    return factor

if __name__ == "__main__":
    print({s: round(right(s), 6) for s in (0, 1, 10, 100, 3125, 100000)})
    assert right(0) == 0.0 and all(abs(right(s) - slow(s)) < 1e-9 for s in (0, 1, 10, 100, 3125, 9999))
    assert abs(right(10**6, batch=64) - right(10**6, batch=32) ** 2) < 1e-12
