"""WSD-S schedule (Wen et al. 2024). The rate decays before each checkpoint and then JUMPS back to the peak without a new warm-up, continuing from the decayed weights; the decay is a linear interpolation of 1/lr, not of lr."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "0-based step"}
SETTINGS = {"peak": "1e-3", "floor": "1e-4, must be above 0 since 1/floor is used", "warmup": "5 steps", "ends": "steps at which a decay ends, (40, 80, 160)", "share": "share of each phase that decays, 0.1"}
NOTES = "Not monotone by intent. Step 0 has rate peak/warmup. After the last end the floor is kept."
import math


def make(seed):
    return {"step": list(range(170))}


def right(step, peak=1e-3, floor=1e-4, warmup=5, ends=(40, 80, 160), share=0.1):
    if step < warmup:
        return peak * (step + 1) / warmup
    begin = 0
    for end in ends:
        if step < end:
            length = max(1, round((end - begin) * share))
            x = max(0.0, (step + 1 - (end - length)) / length)
            return 1.0 / ((1 - x) / peak + x / floor)
        begin = end
    return floor


if __name__ == "__main__":
    lr = [right(s) for s in make(0)["step"]]
    assert math.isclose(lr[0], 2e-4) and math.isclose(lr[4], 1e-3) and math.isclose(lr[35], 1e-3)
    for e in (40, 80, 160):
        assert math.isclose(lr[e - 1], 1e-4)
    assert math.isclose(lr[40], 1e-3) and math.isclose(lr[80], 1e-3) and math.isclose(lr[165], 1e-4)
    assert math.isclose(lr[37], 1 / (0.5 / 1e-3 + 0.5 / 1e-4)) and min(lr) > 0
    print([round(x, 6) for x in lr[33:43]])
