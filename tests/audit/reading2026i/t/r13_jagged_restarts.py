"""Cosine with jagged restarts for ReLoRA. Lialin et al. 2023 (arXiv 2307.05695); axolotl jagged_restart scheduler.
At each merge of the low-rank weights the optimizer state is reset, so the learning rate drops to zero and warms up again within a few steps, back to the value of the outer cosine at that step, not to the peak. The curve is not monotone and has zeros in mid-training."""
import math
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, from 0"}
SETTINGS = {"lr": "peak learning rate, 1e-3", "total": "steps of the run, 200", "warmup": "first warm-up, 20", "every": "steps between restarts, 50", "restart_warmup": "steps of a re-warm-up, 5", "min_ratio": "floor of the outer cosine, 0.1"}
NOTES = "Outer cosine from lr to min_ratio * lr with linear warm-up from 0. A restart happens at each multiple of `every` after 0 (and not within the first warm-up): there the rate is 0 and grows linearly over restart_warmup steps to the outer cosine. Steps beyond total stay at the floor (with restarts)."

def make(seed):
    return {"step": 52 + seed}

def right(step, lr=1e-3, total=200, warmup=20, every=50, restart_warmup=5, min_ratio=0.1):
    if step < warmup:
        return lr * step / warmup
    progress = min(1.0, (step - warmup) / (total - warmup))
    outer = min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
    since = step % every if step >= every else restart_warmup
    return lr * outer * min(1.0, since / restart_warmup)

if __name__ == "__main__":
    c = [right(s) for s in range(201)]
    outer = lambda s: 1e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (s - 20) / 180)))
    assert c[0] == 0 and abs(c[20] - 1e-3) < 1e-12 and c[50] == c[100] == c[150] == 0
    assert all(abs(c[s] - outer(s)) < 1e-12 for s in range(20, 201) if s < 50 or s % 50 >= 5)
    assert all(abs(c[100 + k] - outer(100 + k) * k / 5) < 1e-12 for k in range(5))
    print([round(x, 6) for x in c[48:58]])
