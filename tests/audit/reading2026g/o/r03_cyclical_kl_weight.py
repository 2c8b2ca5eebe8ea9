"""Cyclical weight of the KL term. The weight falls back from 1 to 0 several times during training, which looks like a modulo bug in an annealing; Fu et al. 2019 ("Cyclical annealing schedule: mitigating KL vanishing") do it on purpose."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, counted from 0"}
SETTINGS = {"total": "all steps, 1000", "cycles": "number of cycles, 4", "ramp": "share of a cycle in which the weight rises, 0.5"}
NOTES = ("Weight of the KL term of a VAE. Not monotone: at every multiple of total / cycles it is 0 again. The weight is linear in the first half of a cycle, "
         "then 1. total / cycles need not be whole (float period). From total on the weight stays 1: no fifth cycle starts.")


def right(step, total=1000, cycles=4, ramp=0.5):
    if step >= total:
        return 1.0
    period = total / cycles
    tau = (step % period) / period
    return min(1.0, tau / ramp)


def make(seed):
    import random
    return {"step": random.Random(seed).randrange(1000)}


if __name__ == "__main__":
    v = [right(s) for s in range(1200)]
    assert [s for s in range(1200) if v[s] == 0] == [0, 250, 500, 750]
    for s in range(1000):
        k = 0
        while (k + 1) * 250 <= s:
            k += 1
        want = (s - 250 * k) / 125 if s - 250 * k < 125 else 1.0
        assert abs(v[s] - want) < 1e-12
    assert max(v) == 1 and v[1000:] == [1.0] * 200
    print("mean weight", sum(v[:1000]) / 1000, "zeros at", [0, 250, 500, 750])
