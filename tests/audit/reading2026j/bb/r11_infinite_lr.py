"""Infinite learning-rate schedule (Ibrahim et al. 2024, 'Simple and Scalable Strategies to Continually Pre-train LLMs'): warmup, cosine
cooldown that STOPS at a constant rate well above the minimum, a constant phase of arbitrary length, and an exponential annealing that is
switched on only when a checkpoint is wanted. There is no total step count; without anneal_start the rate never falls again."""
import math

FAMILY = "learning-rate and other schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, 0-based"}
SETTINGS = {"peak": "3e-4", "const": "constant rate, 1.65e-4", "minimum": "rate after annealing, 3e-5", "warmup": "steps, 20", "cooldown": "cosine steps after the warmup, 100",
            "anneal_start": "step where annealing starts, 300 (None: never)", "anneal": "annealing steps, 50"}
NOTES = ("Returns the learning rate. Step 0 has the rate 0 (warmup from 0). Continuous at all three borders. The annealing is exponential: const*(minimum/const)^fraction; "
         "after it the rate stays at minimum (never 0). Needs warmup + cooldown <= anneal_start and minimum > 0. Nothing has to divide anything.")


def make(seed):
    return {"step": (41 * seed) % 400}


def right(step, peak=3e-4, const=1.65e-4, minimum=3e-5, warmup=20, cooldown=100, anneal_start=300, anneal=50):
    if step < warmup:
        return peak * step / warmup
    if step < warmup + cooldown:
        x = (step - warmup) / cooldown
        return const + (peak - const) * 0.5 * (1 + math.cos(math.pi * x))
    if anneal_start is None or step < anneal_start:
        return const
    x = min(1.0, (step - anneal_start) / anneal)
    return const * (minimum / const) ** x


if __name__ == "__main__":
    lr = [right(s) for s in range(400)]
    assert lr[0] == 0 and abs(lr[20] - 3e-4) < 1e-12 and abs(lr[70] - (3e-4 + 1.65e-4) / 2) < 1e-12
    assert lr[120] == lr[299] == lr[300] == 1.65e-4 and abs(lr[350] - 3e-5) < 1e-12 and abs(lr[399] - 3e-5) < 1e-12
    jump = max(abs(a - b) for a, b in zip(lr[20:], lr[21:]))
    ratio = [lr[s + 1] / lr[s] for s in range(300, 350)]
    slow = 1.65e-4                                       # explicit loop: the same factor in each step
    for s in range(300, 350):
        slow *= (3e-5 / 1.65e-4) ** (1 / 50)
    print("largest jump", jump, "factors", min(ratio), max(ratio), "loop end", slow)
    assert jump < 6e-6 and max(ratio) - min(ratio) < 1e-12 and abs(slow - lr[350]) < 1e-12
    assert right(10 ** 7, anneal_start=None) == 1.65e-4
