"""Warm-up, stable, decay with the 1 - sqrt cooldown: the rate is flat for most of the run and drops steeply at the start of the decay (infinite slope), not as a cosine; warm-up starts at 1/warmup and not at zero, so step 0 already learns (Haegele et al. 2024; MiniCPM)."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "number of optimizer steps already taken, from 0"}
SETTINGS = {"peak": "1e-3", "warmup": "10 steps", "total": "100 steps", "decay": "last 20 steps"}
NOTES = "Pure function of the step, so it resumes without state. Value at step = total is exactly zero and stays there. decay divides; must be positive."


def make(seed):
    return {"step": seed % 101}


def right(step, peak=1e-3, warmup=10, total=100, decay=20):
    if step < warmup:
        return peak * (step + 1) / warmup
    if step < total - decay:
        return peak
    x = min(1.0, (step - (total - decay)) / decay)
    return peak * (1 - x ** 0.5)


if __name__ == "__main__":
    v = [right(s) for s in range(130)]
    assert abs(v[0] - 1e-4) < 1e-12 and v[9] == v[10] == v[80] == 1e-3 and v[100] == v[129] == 0.0
    assert all(a >= b for a, b in zip(v[10:], v[11:])) and abs(v[85] - 5e-4) < 1e-12
    print("ok", v[0], v[79:84], v[99])
