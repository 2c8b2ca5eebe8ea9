"""Decay of the weight average grows with the step (TensorFlow's ExponentialMovingAverage num_updates, much the same in diffusers EMAModel): min(decay, (1+n)/(10+n)). In the first step the average keeps only 10 % of the old weights although the setting says 0.999, and a second setting holds the decay at exactly 0 (a plain copy) until update_after."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, 0-based"}
SETTINGS = {"decay": "highest decay, 0.999", "update_after": "steps during which the average is a plain copy, 100"}
NOTES = "Value d of the averaged weights: average = d * average + (1 - d) * weights. 0 up to and including step update_after; then (1+n)/(10+n) with n = step - update_after - 1, capped at decay. Non-decreasing; not a learning rate."


def make(seed):
    return {"step": [0, 100, 101, 102, 200, 1000, 9000, 20000][seed % 8]}


def right(step, decay=0.999, update_after=100):
    n = max(0, step - update_after - 1)
    if step <= update_after:
        return 0.0
    return min(decay, (1 + n) / (10 + n))


if __name__ == "__main__":
    v = [right(s) for s in range(12000)]
    print([round(v[s], 5) for s in (0, 100, 101, 102, 200, 1000, 9000, 11999)])
    assert v[100] == 0 and v[101] == 0.1 and v[11999] == 0.999 and all(a <= b for a, b in zip(v, v[1:]))
    first = next(s for s in range(12000) if v[s] == 0.999)
    assert (1 + (first - 101)) / (10 + (first - 101)) >= 0.999 and abs(first - (101 + 8990)) <= 1
