"""Warmup that starts above zero, a long flat part, and a decay that is steepest at its start; the rate is still above zero at the last step.
Right: WSD with the 1 - sqrt cooldown; step is 0-based, warmup uses step + 1 so that no step is wasted at rate 0, and the floor would be reached one step after the last."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, from 0 to total - 1"}
SETTINGS = {"peak": "2e-3", "warmup": "10 steps", "decay": "last 40 steps", "total": "200 steps", "floor": "0.0"}
NOTES = "Linear warmup (step + 1) / warmup, constant, then floor + (peak - floor) * (1 - sqrt(x)), x the share of the cooldown that is over."


def right(step, peak=2e-3, warmup=10, decay=40, total=200, floor=0.0):
    if step < warmup:
        return peak * (step + 1) / warmup
    x = max(0.0, (step - (total - decay)) / decay)
    return floor + (peak - floor) * (1 - min(1.0, x) ** 0.5)


def make(seed):
    return {"step": 165 + seed}


if __name__ == "__main__":
    v = [right(s) for s in range(200)]
    print([round(v[s], 6) for s in (0, 4, 9, 10, 159, 160, 161, 170, 180, 199)])
    assert v[0] > 0 and v[9] == v[10] == v[160] == 2e-3 and all(a > b for a, b in zip(v[160:], v[161:])) and v[199] > 0 and right(200) == 0
    d = [a - b for a, b in zip(v[160:], v[161:])]
    assert d[0] == max(d)
