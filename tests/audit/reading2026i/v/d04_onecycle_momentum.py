"""OneCycle's momentum grows past 1 in the decay phase. deepspeedai/DeepSpeed#8589,
https://github.com/deepspeedai/DeepSpeed/pull/8589, 2026. _get_decay_mom multiplied the cycle's maximum momentum by
(1 + rate * interval), whereas _get_decay_lr divides by the same factor. With any decay_mom_rate Adam's first beta then
rose without bound after the cycle."""
import math

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, from 0"}
SETTINGS = {"min_mom": "lowest momentum in the cycle, 0.85", "max_mom": "momentum at the ends of the cycle, 0.95",
            "first": "steps of the first half of the cycle, 10", "second": "steps of the second half, 10",
            "decay_step_size": "steps per unit of the decay phase, 5", "decay_mom_rate": "decay rate of the momentum after the cycle, 0.05"}
NOTES = ("Value of Adam's first beta at a step. It falls from max_mom to min_mom in the first half of the cycle and "
         "comes back in the second half (opposite to the learning rate); after the cycle it decays from max_mom, "
         "like the learning rate, by 1 / (1 + rate * intervals). Always in (0, 1).")


def make(seed):
    return {"step": 22 + seed % 20, "min_mom": 0.85, "max_mom": 0.95, "first": 10, "second": 10, "decay_step_size": 5,
            "decay_mom_rate": 0.05}


def cycle_mom(step, min_mom, max_mom, first, second):
    total = first + second
    x = 1.0 + step / total - math.floor(1 + step / total)
    ratio = first / total
    scale = x / ratio if x <= ratio else (x - 1) / (ratio - 1)
    return max_mom - (max_mom - min_mom) * scale


def broken(step, min_mom=0.85, max_mom=0.95, first=10, second=10, decay_step_size=5, decay_mom_rate=0.05):
    if step < first + second:
        return cycle_mom(step, min_mom, max_mom, first, second)
    interval = (step - first - second) / decay_step_size
    return max_mom * (1 + decay_mom_rate * interval)


def right(step, min_mom=0.85, max_mom=0.95, first=10, second=10, decay_step_size=5, decay_mom_rate=0.05):
    if step < first + second:
        return cycle_mom(step, min_mom, max_mom, first, second)
    interval = (step - first - second) / decay_step_size
    return max_mom / (1 + decay_mom_rate * interval)


if __name__ == "__main__":
    for s in (0, 5, 10, 15, 19, 20, 22, 30, 60):
        print(s, round(broken(s), 4), round(right(s), 4))
    m = make(0)
    assert broken(**m) != right(**m) and broken(60) > 1 > right(60) > 0 and right(10) == 0.85
