"""DINO: weight decay rises by a cosine from 0.04 to 0.4 while the learning rate falls.
Caron et al. 2021 (arXiv 2104.14294), cosine_scheduler(weight_decay, weight_decay_end). A schedule that grows until the end of the run, without warmup; the same function gives the teacher momentum, 0.996 to 1.0. It is given per
iteration as a list of niter values in the original, of which the last lies one step before the end value."""
import math
import random

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "iteration, 0 .. total - 1"}
SETTINGS = {"start": "0.04", "end": "0.4", "total": "iterations, 300"}
NOTES = "This is a weight decay, not a learning rate. Rises strictly. The last iteration (total - 1) has not quite reached the end value, as in the original; from total on it is held at the end value."


def make(seed):
    return {"step": random.Random(seed).randint(0, 299)}


def right(step, start=0.04, end=0.4, total=300):
    if step >= total:
        return end
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * step / total))


if __name__ == "__main__":
    curve = [right(s) for s in range(300)]
    assert math.isclose(curve[0], 0.04) and math.isclose(curve[150], 0.22) and 0.3999 < curve[-1] < 0.4 and right(300) == 0.4
    assert all(b > a for a, b in zip(curve, curve[1:]))
    slow = [0.4 + 0.5 * (0.04 - 0.4) * (1 + math.cos(math.pi * i / 300)) for i in range(300)]
    assert all(math.isclose(a, b) for a, b in zip(curve, slow))
    print("weight decay at 0, 150, 299:", curve[0], curve[150], curve[-1])
