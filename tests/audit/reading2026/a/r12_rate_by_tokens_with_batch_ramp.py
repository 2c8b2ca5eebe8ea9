"""A schedule in tokens while the batch grows: equal steps do not mean equal progress.
The batch is doubled at given steps, and the rate is multiplied by sqrt(2) with it; the cosine runs over tokens seen. Per step the
curve bends and jumps upwards although the rate 'should' decay."""
import math
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, from 0"}
SETTINGS = {"base": "rate at the first batch size, 4e-4", "batch": "first batch, 1024 tokens", "doublings": "steps at which the batch doubles, (100, 200)",
            "total_tokens": "tokens of the run, 1024*100 + 2048*100 + 4096*300", "warmup_tokens": "tokens of warm-up, 1024*20"}
NOTES = "Learning rate of a step from the tokens seen before it; square-root scaling with the batch; upward jumps at the doublings are intended."

def make(seed):
    return {"step": 150 + seed}

def tokens_before(step, batch, doublings):
    seen, size, at = 0, batch, 0
    for d in list(doublings) + [math.inf]:
        n = min(step, d) - at
        seen += n * size
        if step <= d:
            return seen, size * (2 if step == d else 1)
        at, size = d, size * 2

def right(step, base=4e-4, batch=1024, doublings=(100, 200), total_tokens=1024 * 100 + 2048 * 100 + 4096 * 300, warmup_tokens=1024 * 20):
    seen, size = tokens_before(step, batch, doublings)
    scale = math.sqrt(size / batch)
    if seen < warmup_tokens:
        return base * scale * (seen + size) / warmup_tokens
    x = min(1.0, (seen - warmup_tokens) / (total_tokens - warmup_tokens))
    return base * scale * 0.5 * (1 + math.cos(math.pi * x))

if __name__ == "__main__":
    def slow(step):
        seen, size = 0, 1024
        for s in range(step + 1):
            if s in (100, 200):
                size *= 2
            if s < step:
                seen += size
        scale = math.sqrt(size / 1024)
        if seen < 1024 * 20:
            return 4e-4 * scale * (seen + size) / (1024 * 20)
        return 4e-4 * scale * 0.5 * (1 + math.cos(math.pi * (seen - 20480) / (1024 * 100 + 2048 * 100 + 4096 * 300 - 20480)))
    worst = max(abs(right(s) - slow(s)) for s in range(500))
    print("largest difference", worst, [(s, round(right(s), 7)) for s in (0, 19, 99, 100, 199, 200, 499)])
    assert worst < 1e-12 and right(100) > right(99) and right(200) > right(199) and right(499) < 1e-6
