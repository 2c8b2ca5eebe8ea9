"""ReLoRA jagged cosine. Every `restart` steps, when the low-rank factors are merged and the Adam state is pruned, the rate falls to exactly 0 and climbs back in a few steps to the cosine's value, not to the peak (Lialin et al. 2023, get_cosine_schedule_with_multiple_warmups)."""
import math
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step counted from 0"}
SETTINGS = {"peak": "peak rate, 1e-3", "warmup": "first warmup steps, 50", "restart": "steps between two merges, 100", "rewarm": "warmup steps after each merge, 10", "total": "steps of the run, 1000", "floor": "lowest share of the peak, 0.1"}
NOTES = "The rate is 0 at step 0 and at every multiple of `restart` below total: dips to zero are meant, the optimizer state is fresh there. restart must divide total, warmup < restart. The line of the rewarm aims at the cosine's value at the end of the rewarm, so the curve is continuous there. From step total on it stays at floor * peak."
def make(seed):
    import random
    return {"step": random.Random(seed).randrange(0, 1000)}
def right(step, peak=1e-3, warmup=50, restart=100, rewarm=10, total=1000, floor=0.1):
    def cosine(s):
        x = min((s - warmup) / (total - warmup), 1.0)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * x))
    if step < warmup:
        return peak * step / warmup
    cycle, inside = divmod(step, restart)
    if 1 <= cycle and step < total and inside < rewarm:
        return peak * inside / rewarm * cosine(cycle * restart + rewarm)
    return peak * cosine(step)
if __name__ == "__main__":
    v = [right(s) for s in range(1100)]
    assert [s for s in range(1000) if v[s] == 0] == list(range(0, 1000, 100))
    for c in range(1, 10):
        assert all(v[c * 100 + i] < v[c * 100 + i + 1] for i in range(10))
        assert v[c * 100 + 10] < v[c * 100 - 1] or c == 0
        d = v[c * 100 + 10] / 10
        assert all(abs(v[c * 100 + i] - i * d) < 1e-12 for i in range(11))
    assert max(v) == v[50] == 1e-3 and abs(v[1000] - 1e-4) < 1e-12 and v[1099] == v[1000]
    print("ok", v[49], v[50], v[99], v[100], v[105], v[110], v[999], v[1000])
