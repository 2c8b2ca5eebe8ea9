"""DeepSeek LLM's multi-step schedule (arXiv:2401.02954): after a step-counted warm-up, the rate jumps to 31.6% of the peak at 80% of the training TOKENS and to 10% at 90%. Warm-up is counted in steps and decay in tokens, because the batch size grows."""

FAMILY = "learning-rate and other schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, 0-based"}
SETTINGS = {"peak": "4.2e-4", "warmup": "warm-up steps, 20", "ramp": "batch-size ramp: the first 100 steps use 512 sequences per step, later steps 2048", "seq_len": "tokens per sequence, 4096", "total_tokens": "tokens of the run, 3e9"}
NOTES = ("Learning rate of the optimizer step. Let tokens = tokens consumed before this step (sum over the earlier steps of batch size * seq_len). For step < warmup: peak*(step+1)/warmup. Then peak while tokens < 80% of total_tokens, "
         "peak*0.316 from 80%, peak*0.1 from 90% (10**-0.5 rounded to three digits as published), constant after the end. Piecewise constant on purpose; warm-up is in steps, milestones in tokens.")


def make(seed):
    return {"step": [5, 150, 370, 420][seed % 4]}


def right(step, peak=4.2e-4, warmup=20, ramp=((100, 512), (None, 2048)), seq_len=4096, total_tokens=3_000_000_000):
    if step < warmup:
        return peak * (step + 1) / warmup
    tokens, done = 0, 0
    for until, bs in ramp:
        n = step - done if until is None else min(step, until) - done
        tokens += max(n, 0) * bs * seq_len
        done += max(n, 0)
    share = tokens / total_tokens
    return peak * (1.0 if share < 0.8 else 0.316 if share < 0.9 else 0.1)


if __name__ == "__main__":
    prev = None
    for s in range(20, 450):
        tok = sum((512 if k < 100 else 2048) * 4096 for k in range(s))
        ref = 4.2e-4 * (1 if tok < 2.4e9 else .316 if tok < 2.7e9 else .1)
        assert abs(ref - right(s)) < 1e-12
        if right(s) != prev:
            print("step", s, right(s), "share", tok / 3e9); prev = right(s)
