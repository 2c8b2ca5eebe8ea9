"""Cyclical KL annealing (Fu et al. 2019): the weight beta of a VAE's KL term ramps 0 -> 1 over the first half of a cycle, stays at 1, and then
falls back to 0 in ONE step, four times per run. The zeros after a warm run are deliberate (they re-open the latent path); the divisor T/M may be fractional."""
import math

FAMILY = "learning-rate and other schedules"
KIND = "schedule"
INPUTS = {"step": "training step, 0-based"}
SETTINGS = {"total": "all steps T, 400", "cycles": "number of cycles M, 4", "ramp": "share of a cycle that ramps, 0.5"}
NOTES = ("Returns the KL weight in [0, 1]; not a learning rate. 0 at the first step of each cycle (also step 0). Not monotone, jumps 1 -> 0 at cycle borders. "
         "A cycle lasts ceil(total/cycles) steps; after total it goes on cycling. cycles need not divide total.")


def make(seed):
    return {"step": (53 * seed) % 400}


def right(step, total=400, cycles=4, ramp=0.5):
    tau = (step % math.ceil(total / cycles)) / (total / cycles)
    return min(1.0, tau / ramp)


if __name__ == "__main__":
    for total, cycles in ((400, 4), (390, 4), (100, 1)):
        length = math.ceil(total / cycles)
        expect, pos = [], 0                     # explicit walk
        for s in range(total):
            expect.append(1.0 if pos / (total / cycles) > 0.5 else pos / (total / cycles) / 0.5)
            pos = 0 if pos + 1 == length else pos + 1
        got = [right(s, total, cycles) for s in range(total)]
        assert max(abs(a - b) for a, b in zip(got, expect)) < 1e-12
        resets = [s for s in range(1, total) if got[s] == 0]
        print(total, cycles, "resets at", resets, "max", max(got), "mean", sum(got) / total)
        assert len(resets) == cycles - 1 and max(got) == 1.0
