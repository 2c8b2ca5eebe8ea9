"""EMA decay grows with the step and starts at zero. diffusers EMAModel, TensorFlow ExponentialMovingAverage(num_updates).
decay = min(max_decay, (1+n)/(10+n)) with n = step - start - 1; before the start the decay is 0, so the average is a plain copy of the weights. The "0.9999" of the config is reached after tens of thousands of steps only."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step that has just ended, from 1"}
SETTINGS = {"max_decay": "upper bound, 0.9999", "min_decay": "lower bound once the average runs, 0.0", "start": "steps before averaging starts, 100"}
NOTES = "ema = decay * ema + (1 - decay) * weights, applied once per optimizer step. Decay 0 (a copy) up to step start + 1. Then (1+n)/(10+n), bounded by min_decay and max_decay. Grows with the step."

def make(seed):
    return {"step": 150 + 10 * seed}

def right(step, max_decay=0.9999, min_decay=0.0, start=100):
    n = max(0, step - start - 1)
    if n <= 0:
        return 0.0
    return max(min_decay, min(max_decay, (1 + n) / (10 + n)))

if __name__ == "__main__":
    c = [right(s) for s in range(1, 200000)]
    assert c[:101] == [0.0] * 101 and all(b >= a for a, b in zip(c, c[1:])) and c[-1] == 0.9999
    assert abs(right(150) - 50 / 59) < 1e-12
    print(right(101), right(102), right(150), right(100000))
