"""Warm-up, stable, 1-sqrt cooldown: the rate is flat for most of the run and then falls steeply first.
Step 0 already has a positive rate ((step+1)/warmup) and the last step is not quite 0, because the fraction is taken at the
start of the step; there is a kink, not a smooth join, where the cooldown begins."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, from 0 to total-1"}
SETTINGS = {"peak": "peak learning rate, 1e-3", "total": "steps, 1000", "warmup": "warm-up steps, 50", "cooldown": "cooldown steps, 200"}
NOTES = "Learning rate. Cooldown factor 1 - sqrt(x), x = share of the cooldown that has passed before the step; 0 would be reached at step total."

def make(seed):
    return {"step": 850 + seed}

def right(step, peak=1e-3, total=1000, warmup=50, cooldown=200):
    if step < warmup:
        return peak * (step + 1) / warmup
    if step < total - cooldown:
        return peak
    return peak * (1 - ((step - (total - cooldown)) / cooldown) ** 0.5)

if __name__ == "__main__":
    rates = [right(s) for s in range(1000)]
    print("steps 0, 49, 500, 800, 801, 850, 999:", [rates[i] for i in (0, 49, 500, 800, 801, 850, 999)])
    assert rates[0] > 0 and rates[49] == rates[800] == 1e-3 and 0 < rates[999] < 3e-6
    assert all(a >= b for a, b in zip(rates[800:], rates[801:])) and abs(rates[850] - 1e-3 * 0.5) < 1e-9
