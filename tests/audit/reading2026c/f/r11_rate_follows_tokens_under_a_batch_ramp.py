"""Right: the batch grows during the run and the schedule is a function of tokens seen, not of updates. Per update the rate falls slowly at first and then faster, and it is scaled by the square root of the batch, so it jumps up whenever the batch grows."""
import math

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "index of the update, 0 ... 139"}
SETTINGS = {"peak": "rate at the full batch, 0.001", "floor": "final share of the rate, 0.1", "ramp": "(updates, rows) stages of the batch, ((40, 16), (40, 32), (60, 64))", "warmup_rows": "rows over which the rate warms up, 320"}
NOTES = "rate = peak * sqrt(batch / full batch) * shape(rows seen before this update / total rows); shape is linear warmup over warmup_rows, then cosine to the floor. Counted in rows (of equal length), so an update with 64 rows moves four times as far as one with 16. Upward jumps at updates 40 and 80 are intended."

def make(seed):
    return {"step": 75 + seed % 20}

def right(step, peak=1e-3, floor=0.1, ramp=((40, 16), (40, 32), (60, 64)), warmup_rows=320):
    seen, left, batch = 0, step, ramp[-1][1]
    for updates, rows in ramp:
        if left < updates:
            seen, batch = seen + left * rows, rows
            break
        seen, left = seen + updates * rows, left - updates
    total = sum(updates * rows for updates, rows in ramp)
    if seen < warmup_rows:
        shape = (seen + batch) / (warmup_rows + batch)
    else:
        shape = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (seen - warmup_rows) / (total - warmup_rows)))
    return peak * math.sqrt(batch / ramp[-1][1]) * shape

def slow():
    rows = [16] * 40 + [32] * 40 + [64] * 60
    out, seen = [], 0
    for b in rows:
        shape = (seen + b) / (320 + b) if seen < 320 else 0.1 + 0.45 * (1 + math.cos(math.pi * (seen - 320) / (sum(rows) - 320)))
        out.append(1e-3 * math.sqrt(b / 64) * shape)
        seen += b
    return out

if __name__ == "__main__":
    rates = [right(s) for s in range(140)]
    print({s: round(rates[s], 6) for s in (0, 19, 20, 39, 40, 79, 80, 139)})
    assert max(abs(a - b) for a, b in zip(rates, slow())) < 1e-12 and rates[40] > rates[39] and rates[80] > rates[79]
