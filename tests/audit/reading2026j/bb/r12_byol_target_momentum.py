"""EMA momentum of a target network that RISES with a cosine to exactly 1 (BYOL, Grill et al. 2020; DINO uses the same from 0.996). At the
last step the target is frozen: 'target = 1.0 * target + 0.0 * online' is intended, not a dead update."""
import math

FAMILY = "learning-rate and other schedules"
KIND = "schedule"
INPUTS = {"step": "training step k, 0-based"}
SETTINGS = {"base": "initial momentum, 0.996", "total": "all steps K, 500"}
NOTES = ("Returns the momentum tau of target = tau*target + (1-tau)*online. Between base and 1, never falls, is 1 at step == total and after. Not a learning rate. "
         "Half-way it is (1+base)/2. No divisibility.")


def make(seed):
    return {"step": (73 * seed) % 501}


def right(step, base=0.996, total=500):
    k = min(step, total)
    return 1.0 - (1.0 - base) * (math.cos(math.pi * k / total) + 1.0) / 2.0


if __name__ == "__main__":
    tau = [right(k) for k in range(501)]
    assert abs(tau[0] - 0.996) < 1e-12 and abs(tau[250] - 0.998) < 1e-12 and tau[500] == 1.0 and right(900) == 1.0
    assert all(a <= b + 1e-15 for a, b in zip(tau, tau[1:]))
    # same thing by sin^2: tau = base + (1-base) * sin^2(pi k / 2K)
    worst = max(abs(t - (0.996 + 0.004 * math.sin(math.pi * k / 1000) ** 2)) for k, t in enumerate(tau))
    target = 0.0                                # online weight fixed at 1: the target's distance is the product of all taus
    dist = 1.0
    for t in tau:
        target = t * target + (1 - t) * 1.0
        dist *= t
    print("sin^2 error", worst, "target", target, "1 - product", 1 - dist)
    assert worst < 1e-12 and abs(target - (1 - dist)) < 1e-12
