"""Batch-size ramp by samples, not by steps.
Megatron --rampup-batch-size start increment samples: the batch grows in jumps after equal numbers of SAMPLES, so early sizes last for more steps; a step's size is read from the samples consumed before it. The number of accumulation steps varies during training on purpose."""
FAMILY = "schedule of batch size"
KIND = "schedule"
INPUTS = {"step": "0-based optimizer step"}
SETTINGS = {"start": "first batch, 8", "inc": "increment, 8", "ramp": "samples over which it grows, 240", "full": "final batch, 32"}
NOTES = "Returns the batch size as a float. inc must divide full - start. With ramp samples and n = (full-start)/inc jumps, each size holds for ramp/n samples. Non-decreasing."
def make(seed): return {"step": seed % 40}
def size_at(consumed, start, inc, ramp, full):
    n = (full - start) // inc
    if consumed > ramp or n == 0: return full
    return min(full, start + int(consumed / (ramp / n)) * inc)
def right(step, start=8, inc=8, ramp=240, full=32):
    assert (full - start) % inc == 0
    consumed = 0
    for _ in range(step):
        consumed += size_at(consumed, start, inc, ramp, full)
    return float(size_at(consumed, start, inc, ramp, full))
if __name__ == "__main__":
    v = [right(s) for s in range(30)]
    print(v)
    # by hand: 80 samples at 8 = 10 steps, 80 at 16 = 5 steps, then 24 until 240 or more
    assert v[:10] == [8.0] * 10 and v[10:15] == [16.0] * 5 and v[15:19] == [24.0] * 4 and v[19] == 32.0
    assert all(a <= b for a, b in zip(v, v[1:])) and sum(v[:19]) >= 240
