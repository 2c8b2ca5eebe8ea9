"""The learning rate depends on the tokens seen, with a batch size that grows.
Batches grow from 64 to 256 tokens in three stages, so equal steps are unequal progress. Warm-up and decay are in
tokens, and the rate rises by sqrt of the batch-size ratio at each stage. By step the curve has
jumps up in the middle of the decay."""
import math

FAMILY = 'schedules'
KIND = 'schedule'
INPUTS = {
    'step': 'optimizer step, counted from 0',
}
SETTINGS = {
    'peak': 'rate of the base batch, 1e-3',
    'warmup_tokens': '640',
    'total_tokens': '16000',
    'stages': '(first step, tokens per step): (0, 64), (50, 128), (90, 256)',
}
NOTES = (
    'peak * sqrt(tokens per step / 64) * factor(tokens seen before the step); factor: linear warm-up '
    'over warmup_tokens, then linear to 0.1 at total_tokens, constant afterwards. Jumps up at the '
    'stages are intended. '
)


STAGES = ((0, 64), (50, 128), (90, 256))


def make(seed):
    return {"step": [0, 5, 49, 50, 89, 90, 120][seed % 7]}


def right(step, peak=1e-3, warmup_tokens=640, total_tokens=16000, stages=STAGES):
    seen, size = 0, stages[0][1]
    for k, (first, n) in enumerate(stages):
        if step < first:
            break
        last = stages[k + 1][0] if k + 1 < len(stages) else step
        seen += n * (min(step, last) - first)
        size = n
    if seen < warmup_tokens:
        factor = (seen + size) / (warmup_tokens + size)
    else:
        progress = min(1.0, (seen - warmup_tokens) / (total_tokens - warmup_tokens))
        factor = 1.0 - 0.9 * progress
    return peak * math.sqrt(size / stages[0][1]) * factor


if __name__ == "__main__":
    seen = 0
    for s in range(140):
        size = [n for first, n in STAGES if s >= first][-1]
        f = (seen + size) / (640 + size) if seen < 640 else 1 - 0.9 * min(1.0, (seen - 640) / 15360)
        assert abs(right(s) - 1e-3 * math.sqrt(size / 64) * f) < 1e-12
        seen += size
    print([(s, round(right(s), 6)) for s in (0, 5, 9, 10, 49, 50, 89, 90, 120, 139)])
    assert right(50) > right(49) and right(90) > right(89) and right(0) > 0
