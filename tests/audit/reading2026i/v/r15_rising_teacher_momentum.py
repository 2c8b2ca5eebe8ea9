"""A cosine that rises: teacher momentum to 1 in self-distillation. DINO and BYOL raise the teacher's EMA momentum from 0.996
to 1 by a cosine, and DINO raises the weight decay from 0.04 to 0.4 likewise. At the end the teacher no longer moves.
The table has one entry per iteration and the last one is just below the end value."""
import math

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "iteration, from 0"}
SETTINGS = {"base": "momentum at the start, 0.996", "final": "momentum at the end, 1.0", "epochs": "epochs, 10", "iters": "iterations per epoch, 30"}
NOTES = ("EMA momentum of the teacher: teacher = m * teacher + (1 - m) * student. It rises with a cosine, without warmup; "
         "as in the published code the angle is i / len, so 1.0 is never reached exactly inside the run; steps past "
         "the end hold the last entry.")


def make(seed):
    return {"step": 100 + seed, "base": 0.996, "final": 1.0, "epochs": 10, "iters": 30}


def right(step, base=0.996, final=1.0, epochs=10, iters=30):
    n = epochs * iters
    i = min(step, n - 1)
    return final + 0.5 * (base - final) * (1 + math.cos(math.pi * i / n))


if __name__ == "__main__":
    values = [right(s) for s in range(305)]
    print([(s, round(values[s], 6)) for s in (0, 75, 150, 225, 299, 304)])
    assert values[0] == 0.996 and abs(values[150] - 0.998) < 1e-9 and values[299] < 1.0 and values[304] == values[299]
    assert all(a <= b for a, b in zip(values, values[1:]))
