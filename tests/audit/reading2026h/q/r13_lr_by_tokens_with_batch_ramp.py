"""Learning rate as a function of tokens seen while the batch grows. GPT-3 (Brown et al. 2020: cosine over 260 B tokens, warm-up over 375 M tokens, batch ramp) and Megatron-LM's sample-based schedule.
Equal steps do not move the schedule by equal amounts: early steps have small batches, so the rate changes slowly per step and then faster. The cosine ends before the run does and stays at 10 %."""
import math
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "index of the optimizer step, from 0"}
SETTINGS = {"lr": "peak, 6e-4", "small": "batch at the start in tokens, 1000", "full": "batch at the end, 8000", "ramp": "steps in which the batch grows linearly, 50", "warm_tokens": "warm-up, 20000 tokens", "decay_tokens": "end of the cosine, 600000 tokens", "floor": "smallest share of the peak, 0.1"}
NOTES = "Learning rate of the optimizer step, by the number of tokens seen BEFORE the step plus those of the step. The batch of step s is small + (full - small) * min(1, s / ramp), rounded down. The cosine runs from token 0 to decay_tokens (not from the end of the warm-up), min of warm-up line and 1 as the factor during warm-up. Constant at floor * lr after decay_tokens."


def make(seed):
    return {"step": list(range(120))}


def batch_tokens(step, small=1000, full=8000, ramp=50):
    return int(small + (full - small) * min(1.0, step / ramp))


def right(step, lr=6e-4, small=1000, full=8000, ramp=50, warm_tokens=20000, decay_tokens=600000, floor=0.1):
    tokens = sum(batch_tokens(s, small, full, ramp) for s in range(step + 1))
    warm = min(1.0, tokens / warm_tokens)
    f = min(1.0, tokens / decay_tokens)
    return lr * warm * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * f)))


if __name__ == "__main__":
    v = [right(s) for s in make(0)["step"]]
    tok, t = [], 0
    for s in range(120):
        t += batch_tokens(s)
        tok.append(t)
    print("tokens", tok[0], tok[50], tok[-1], "rates", v[0], max(v), v[60], v[-1])
    end = next(i for i, x in enumerate(tok) if x >= 600000)
    assert abs(v[0] - 6e-4 * 0.05) < 1e-6 and all(abs(x - 6e-5) < 1e-12 for x in v[end:]) and v[end - 1] > 6e-5
