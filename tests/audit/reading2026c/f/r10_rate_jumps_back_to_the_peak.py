"""Right: WSD-S, a constant rate with several short decays. After each decay a checkpoint is published and the rate jumps back to the peak in one step, so the schedule is neither smooth nor falling."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "index of the update, 0 ... 99"}
SETTINGS = {"peak": "constant rate, 0.002", "floor": "rate at the end of each decay, 0.0002", "warmup": "warmup updates, 10", "ends": "updates at which a decay ends, (40, 70, 100)", "decay": "share of the updates since the last end that are decayed over, 0.2"}
NOTES = "Warmup (step + 1) / warmup; inverse-linear decay 1 / (share / floor + (1 - share) / peak) as in the WSD-S paper; the last update before an end uses exactly the floor; right after it the peak again, without warmup. The jump is intended."

def make(seed):
    return {"step": 34 + seed % 60}

def right(step, peak=2e-3, floor=2e-4, warmup=10, ends=(40, 70, 100), decay=0.2):
    if step < warmup:
        return peak * (step + 1) / warmup
    start = 0
    for end in ends:
        if step < end:
            break
        start = end
    length = round((end - start) * decay)
    share = (step - (end - length) + 1) / length
    return peak if share <= 0 else 1 / (share / floor + (1 - share) / peak)

def slow():
    rates = [2e-3 * (s + 1) / 10 for s in range(10)]
    for stable, length in ((22, 8), (24, 6), (24, 6)):
        rates += [2e-3] * stable
        rates += [1 / ((i + 1) / length / 2e-4 + (1 - (i + 1) / length) / 2e-3) for i in range(length)]
    return rates

if __name__ == "__main__":
    rates = [right(s) for s in range(100)]
    print({s: round(rates[s], 6) for s in (0, 9, 31, 32, 39, 40, 69, 70, 99)})
    assert len(slow()) == 100 and max(abs(x - y) for x, y in zip(rates, slow())) < 1e-9
    assert abs(rates[39] - 2e-4) < 1e-12 and rates[40] == 2e-3 and abs(rates[99] - 2e-4) < 1e-12
