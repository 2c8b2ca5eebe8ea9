"""Learning rate as a function of packed tokens consumed, under a batch-size ramp (GPT-3, Megatron --rampup-batch-size with sample-based decay). Packed rows make the tokens of a step exact; the ramp makes the curve over steps have kinks and the warm-up convex, although it is linear and cosine in tokens."""
import math
FAMILY = "packing"
KIND = "schedule"
INPUTS = {"step": "optimizer steps done before this one, 0, 1, ..."}
SETTINGS = {"peak": "1e-3", "floor": "1e-4", "row": "tokens per packed row, 128", "rows_from": "rows at the start, 4", "rows_to": "rows after the ramp, 16", "add": "rows added per ramp stage, 4",
            "stage_rows": "samples per ramp stage, 40", "warm": "warm-up tokens, 10240", "total": "decay ends, 102400 tokens"}
NOTES = "The rate at step 0 is 0-based on tokens before the step (so 0). Number of rows is constant in a stage; a stage ends at the first step at which its 40 rows are used up. After 'total' tokens the floor holds. Pure function of step; not linear in steps during warm-up."
def make(seed):
    import random
    return {"step": random.Random(seed).randint(0, 80)}

def tokens_before(step, row, rows_from, rows_to, add, stage_rows):
    done, size = 0, rows_from
    while size < rows_to:
        n = math.ceil(stage_rows / size)
        if step < n:
            return (done + step * size) * row
        done += n * size; step -= n; size = min(size + add, rows_to)
    return (done + step * size) * row

def right(step, peak=1e-3, floor=1e-4, row=128, rows_from=4, rows_to=16, add=4, stage_rows=40, warm=10240, total=102400):
    t = tokens_before(step, row, rows_from, rows_to, add, stage_rows)
    if t < warm:
        return peak * t / warm
    if t >= total:
        return floor
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * (t - warm) / (total - warm)))

if __name__ == "__main__":
    seen, size, used = 0, 4, 0                       # twin: count as a training loop would
    for step in range(90):
        lr = 1e-3 * seen / 10240 if seen < 10240 else 1e-4 + 9e-4 * .5 * (1 + math.cos(math.pi * min(1, (seen - 10240) / 92160)))
        assert abs(lr - right(step)) < 1e-12, step
        seen += size * 128; used += size
        if size < 16 and used >= 40:
            size, used = min(16, size + 4), 0
    print([round(right(s), 6) for s in (0, 1, 9, 10, 11, 14, 15, 20, 40, 80)])
    assert right(11) - right(10) > right(1) - right(0)
