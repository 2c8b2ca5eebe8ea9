"""Warmup-stable-decay with a '1 - sqrt' cooldown (Haegele et al. 2024, 'Scaling Laws and Compute-Optimal Training Beyond Fixed Training
Durations'). The rate is flat for most of the run and then falls with an infinite slope at the first cooldown moment: a visible drop in a single
step, steepest at the START of the decay. The paper finds it better than linear or cosine."""
import math

FAMILY = "learning-rate and other schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, 0-based; the rate used for that step"}
SETTINGS = {"peak": "peak rate, 1e-3", "warmup": "linear warmup steps, 10", "total": "all steps, 200", "cooldown": "cooldown steps, 40 (20 percent)"}
NOTES = ("Returns the learning rate. Warmup gives peak*(step+1)/warmup, so step 0 is not 0. Constant until total-cooldown inclusive. "
         "Reaches exactly 0 at step == total, which is never trained (last trained step total-1 has a small positive rate); 0 after that. "
         "Needs warmup + cooldown <= total. No setting has to divide another.")


def make(seed):
    return {"step": (37 * seed) % 201}


def right(step, peak=1e-3, warmup=10, total=200, cooldown=40):
    if step < warmup:
        return peak * (step + 1) / warmup
    start = total - cooldown
    if step <= start:
        return peak
    return peak * (1.0 - math.sqrt(min(1.0, (step - start) / cooldown)))


if __name__ == "__main__":
    lr = [right(s) for s in range(201)]
    assert abs(lr[0] - 1e-4) < 1e-15 and lr[9] == lr[10] == lr[160] == 1e-3 and lr[200] == 0 and right(500) == 0
    assert abs(lr[170] - 0.5e-3) < 1e-12                      # a quarter of the cooldown: half the rate
    assert all(a >= b for a, b in zip(lr[9:], lr[10:])) and min(lr[:200]) > 0
    # independent check: invert the formula, n = start + cooldown * (1 - lr/peak)^2
    worst = max(abs(160 + 40 * (1 - lr[s] / 1e-3) ** 2 - s) for s in range(160, 201))
    drops = [lr[s] - lr[s + 1] for s in range(160, 200)]
    print("first drop", drops[0], "last drop", drops[-1], "inverse error", worst)
    assert worst < 1e-9 and drops[0] == max(drops)
