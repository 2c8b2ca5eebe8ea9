"""The learning rate jumps up in the middle of the decay, several times.
Right: the batch size doubles at given points and the rate is multiplied by the square root of the batch growth (Adam scaling); progress is counted in samples, so steps after a jump also move the cosine faster."""
import math

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, from 0"}
SETTINGS = {"base": "rate at the first batch size, 1e-3", "stages": "(steps, batch) pairs: 100 steps of 32, 100 of 64, 100 of 128"}
NOTES = "Cosine from base to 0 over all samples of the run, times sqrt(batch / first batch)."


def right(step, base=1e-3, stages=((100, 32), (100, 64), (100, 128))):
    total = sum(n * b for n, b in stages)
    seen, left, batch = 0, step, stages[-1][1]
    for n, b in stages:
        k = min(n, left)
        seen += k * b
        left -= k
        if k < n:
            batch = b
            break
    return base * 0.5 * (1 + math.cos(math.pi * min(1.0, seen / total))) * math.sqrt(batch / stages[0][1])


def make(seed):
    return {"step": 100 + seed}


if __name__ == "__main__":
    v = [right(s) for s in range(301)]
    print([round(v[s], 6) for s in (0, 50, 99, 100, 150, 199, 200, 250, 299, 300)])
    assert v[100] > v[99] and v[200] > v[199] and v[0] == 1e-3 and abs(v[300]) < 1e-9
    seen = 100 * 32 + 50 * 64
    assert abs(v[150] - 1e-3 * 0.5 * (1 + math.cos(math.pi * seen / 22400)) * 2 ** 0.5) < 1e-12
