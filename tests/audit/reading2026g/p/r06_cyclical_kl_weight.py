"""Cyclical annealing of the KL term. The weight beta of a text VAE climbs to 1, stays there for half of a cycle and then jumps straight back to 0, four times in a run (Fu et al. 2019, against posterior collapse)."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step counted from 0"}
SETTINGS = {"total": "steps of the run, 800", "cycles": "number of cycles, 4", "ramp": "share of a cycle that climbs, 0.5", "top": "highest weight, 1.0"}
NOTES = "Weight of a loss term. Exactly 0 at the first step of each cycle (plain autoencoder there), discontinuous on purpose. cycles divides total. After total the last value (top) is kept, no fifth cycle starts."
def make(seed):
    import random
    return {"step": random.Random(seed).randrange(0, 800)}
def right(step, total=800, cycles=4, ramp=0.5, top=1.0):
    if step >= total:
        return float(top)
    length = total // cycles
    tau = (step % length) / length
    return top * min(1.0, tau / ramp)
if __name__ == "__main__":
    v = [right(s) for s in range(900)]
    assert [s for s in range(900) if v[s] == 0] == [0, 200, 400, 600]
    for c in range(4):
        assert all(abs(v[c * 200 + i] - i / 100) < 1e-12 for i in range(100)) and set(v[c * 200 + 100:c * 200 + 200]) == {1.0}
    assert set(v[800:]) == {1.0}
    print("ok", v[0], v[50], v[100], v[199], v[200], sum(v[:800]) / 800)
