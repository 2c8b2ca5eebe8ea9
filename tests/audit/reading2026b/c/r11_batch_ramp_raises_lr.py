"""Learning rate jumps up when the batch grows. The batch size doubles at given token counts; the learning rate is a function of consumed tokens, not of steps, and is multiplied by the square root of the batch ratio. So it
rises in steps inside a falling cosine, and steps are not equally spaced in the schedule. At the first step no tokens are consumed, yet the rate is not zero."""
import math

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, from 0"}
SETTINGS = {"lr": "base rate for the smallest batch, 1e-3", "sizes": "batch sizes in tokens: 100, 200, 400", "until": "tokens at which a size ends: 1000, 3000, 9000 (end of training)"}
NOTES = "tokens consumed before the step = sum of the sizes of all steps before; rate = lr * sqrt(size / smallest size) * (0.1 + 0.9 * (1 + cos(pi * tokens / 9000)) / 2). There are 10 + 10 + 15 steps."


def make(seed):
    return {"step": [0, 9, 10, 19, 20, 27, 34][seed % 7]}


def right(step, lr=1e-3, sizes=(100, 200, 400), until=(1000, 3000, 9000)):
    start, first = 0, 0
    for size, end in zip(sizes, until):
        steps = (end - start) // size
        if step < first + steps or end == until[-1]:
            tokens = min(start + (step - first) * size, until[-1])
            return lr * math.sqrt(size / sizes[0]) * (0.1 + 0.45 * (1 + math.cos(math.pi * tokens / until[-1])))
        first, start = first + steps, end


if __name__ == "__main__":
    tokens, got = 0, []
    for step in range(35):
        size = 100 if tokens < 1000 else 200 if tokens < 3000 else 400
        want = 1e-3 * (size / 100) ** 0.5 * (0.1 + 0.9 * (1 + math.cos(math.pi * tokens / 9000)) / 2)
        assert abs(right(step) - want) < 1e-12, step
        got.append(right(step))
        tokens += size
    print("tokens", tokens, "rates at 9,10,19,20,34", [round(got[s] * 1e3, 4) for s in (9, 10, 19, 20, 34)])
    assert tokens == 9000 and got[10] > got[9] and got[20] > got[19]
