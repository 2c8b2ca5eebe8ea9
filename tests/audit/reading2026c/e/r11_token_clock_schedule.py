"""The LR follows tokens, not steps, while the batch grows. The batch size doubles at two points of the run, so a step is
worth more and more tokens; the cosine runs over tokens and the LR is multiplied by sqrt(batch / first batch) as the batch
grows. Over steps the curve has jumps upwards and its bends are not where a cosine over steps has them."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, from 0"}
SETTINGS = {"base_lr": "LR at the first batch size, 1e-3", "batches": "tokens of a step in the three phases, (1000, 2000, 4000)",
            "changes": "steps at which the batch grows, (50, 90)", "total_tokens": "tokens of the run, 250000", "warmup_tokens": "10000"}
NOTES = ("lr(step) = base_lr * sqrt(batch(step) / batches[0]) * shape(tokens before the step): linear warmup, then cosine to 0 at "
         "total_tokens and 0 after it. Jumps up at the changes are intended.")
import math


def make(seed):
    return {"step": [50, 3, 100, 400][seed % 4]}


def right(step, base_lr=1e-3, batches=(1000, 2000, 4000), changes=(50, 90), total_tokens=250000, warmup_tokens=10000):
    edges = [0, *changes]
    seen, batch = 0, batches[0]
    for k, begin in enumerate(edges):
        end = edges[k + 1] if k + 1 < len(edges) else math.inf
        if step >= begin:
            batch = batches[k]
            seen += (min(step, end) - begin) * batches[k]
    shape = min(1.0, (seen + batch) / warmup_tokens) if seen < warmup_tokens else \
        0.5 * (1 + math.cos(math.pi * min(1.0, (seen - warmup_tokens) / (total_tokens - warmup_tokens))))
    return base_lr * math.sqrt(batch / batches[0]) * shape


if __name__ == "__main__":
    tokens = 0
    for step in range(130):                                      # explicit loop over steps
        batch = 1000 if step < 50 else 2000 if step < 90 else 4000
        if tokens < 10000:
            shape = min(1.0, (tokens + batch) / 10000)
        else:
            shape = 0.5 * (1 + math.cos(math.pi * min(1.0, (tokens - 10000) / 240000)))
        assert abs(right(step) - 1e-3 * (batch / 1000) ** 0.5 * shape) < 1e-12, step
        tokens += batch
    print([f"{right(s):.2e}" for s in (0, 9, 49, 50, 89, 90, 119, 400)])
    assert right(50) > right(49) and right(400) == 0.0
