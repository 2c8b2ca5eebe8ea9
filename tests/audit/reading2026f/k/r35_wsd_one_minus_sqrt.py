"""Warmup-stable-decay with the 1 - sqrt cooldown (Haegele et al. 2024). Flat for most of the run; the cooldown falls steeply at first (infinite slope of the
square root at its start) and the last step is exactly 0. Warmup starts at 1/warmup, not at 0, so step 0 trains."""
FAMILY = "schedule"
KIND = "schedule"
INPUTS = {"step": "number of optimizer steps already done, 0 .. total"}
SETTINGS = {"peak": "3e-4", "warmup": "10 steps", "total": "100 steps", "cooldown": "last 20 steps"}
NOTES = "Learning rate as a function of the step. warmup + cooldown must not exceed total; steps beyond total stay at 0. cooldown divides the progress."


def make(seed):
    return {"step": seed * 7 % 101}


def right(step, peak=3e-4, warmup=10, total=100, cooldown=20):
    if step < warmup:
        return peak * (step + 1) / warmup
    start = total - cooldown
    if step <= start:
        return peak
    progress = min(1.0, (step - start) / cooldown)
    return peak * (1 - progress ** 0.5)


if __name__ == "__main__":
    lr = [right(s) for s in range(102)]
    assert abs(lr[0] - 3e-5) < 1e-12 and abs(lr[9] - 3e-4) < 1e-12 and lr[10] == lr[80] == 3e-4 and lr[100] == lr[101] == 0
    assert abs(lr[85] - 3e-4 * 0.5) < 1e-12 and all(x >= y for x, y in zip(lr[10:], lr[11:]))      # a quarter of the cooldown: half gone
    print([f"{lr[s]:.2e}" for s in (0, 9, 50, 80, 81, 85, 95, 100)])
