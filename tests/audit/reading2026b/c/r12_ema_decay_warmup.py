"""Decay of the weight average is itself scheduled. The decay starts at 0.1 and grows as (1 + t) / (10 + t) up to 0.999, and it is raised to the power of the steps between two updates, since the average is updated every fourth step only.
The first update nearly copies the weights; with a constant 0.999 the average would keep the random start."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, from 0"}
SETTINGS = {"top": "largest decay per step, 0.999", "every": "the average is updated at steps divisible by 4; otherwise the factor is 1 (nothing changes)"}
NOTES = "Factor on the old average at a step: 1.0 at steps without an update, min(top, (1 + t) / (10 + t)) ** every at updates, with t = step. The new weights get 1 - factor."


def make(seed):
    return {"step": seed * 4 if seed % 2 else seed * 4 + 1}


def right(step, top=0.999, every=4):
    if step % every:
        return 1.0
    return min(top, (1 + step) / (10 + step)) ** every


if __name__ == "__main__":
    average, weight_of_start = 0.0, 1.0
    for step in range(40001):
        d = right(step)
        average = d * average + (1 - d) * 3.0
        weight_of_start *= d
    print("factors", [round(right(s), 5) for s in (0, 1, 4, 40, 4000, 40000)], "average of a constant 3.0:", average)
    assert abs(average - 3.0) < 1e-9 and right(40000) == 0.999 ** 4 and right(0) == 0.1 ** 4
