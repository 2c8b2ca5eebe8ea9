"""Warmup-stable-decay with the 1-sqrt cooldown (Hagele et al. 2024, arXiv 2405.18392). The rate falls steeply at the start of the cooldown and flatly at its end, the reverse of a cosine, and the stable phase depends
on no total; here the cooldown can be started from any checkpoint."""
import math

FAMILY = "learning-rate and other schedules"
KIND = "schedule"
INPUTS = {"step": "0-based index of the optimizer update"}
SETTINGS = {"peak": "rate of the stable phase, 3e-3", "warmup": "number of warmup updates, 20", "cooldown_start": "first update of the cooldown, 140, or None for a run that is still in its stable phase",
            "cooldown": "number of updates of the cooldown, 60"}
VALUES = {"peak": 3e-3, "warmup": 20, "cooldown_start": 140, "cooldown": 60}
NOTES = """Learning rate of update `step`. step < warmup: peak*(step+1)/warmup (no update has rate 0; update warmup-1 is already at the peak). Then peak, for as long as needed; the stable phase knows no total number of steps. From cooldown_start: with
c = (step - cooldown_start + 1)/(cooldown + 1), peak*(1 - sqrt(c)): steep first, flat at the end; the first cooldown update is already below the peak, the last one is above 0; after the cooldown 0.
cooldown_start = None: no cooldown. cooldown_start >= warmup."""


def make(seed):
    return {"step": [0, 19, 20, 100, 139, 140, 150, 199, 200][seed % 9]}


def right(step, peak=3e-3, warmup=20, cooldown_start=140, cooldown=60):
    if step < warmup:
        return peak * (step + 1) / warmup
    if cooldown_start is None or step < cooldown_start:
        return peak
    c = (step - cooldown_start + 1) / (cooldown + 1)
    return peak * max(0.0, 1 - math.sqrt(c))


if __name__ == "__main__":
    rates = [right(s) for s in range(205)]
    ref = [3e-3 * (s + 1) / 20 for s in range(20)] + [3e-3] * 120 + [3e-3 * (1 - (k / 61) ** 0.5) for k in range(1, 61)] + [0.0] * 5
    print("table", [round(right(make(i)["step"]), 6) for i in range(9)], "max error", max(abs(a - b) for a, b in zip(rates, ref)))
