"""WSD-S: the learning rate jumps back to its peak after each decay. Understanding Warmup-Stable-Decay Learning Rates (Wen et al.,
2024, arXiv:2410.05192), used in levanter/marin as a cyclic WSD schedule. The run decays at several budgets, each decayed
checkpoint is kept as a result and training simply goes on from it at the peak rate, without a new warmup. The decay is linear in
1/lr, not in lr."""

FAMILY = "schedules, updates, and saved or cached state"
KIND = "schedule"
INPUTS = {"step": "number of optimizer updates done so far, 0 ... 239"}
SETTINGS = {"peak_lr": "peak learning rate, 2e-3", "min_lr": "rate at the end of each decay, 2e-4", "warmup": "linear warmup steps, only once, 20",
            "ends": "steps at which the budgets end, (80, 160, 240)", "decay_frac": "part of each budget end's step count that is decay, 0.1"}
NOTES = ("Warmup from peak_lr/20 at step 0 to peak_lr at step 19. Then peak_lr, except for the last decay_frac * end steps before each end (8, 16, 24 steps): there 1/lr goes linearly from 1/peak_lr to 1/min_lr, "
         "and the last step before the end (79, 159, 239) has exactly min_lr. The step after an end (80, 160) is at peak_lr again, a jump by a factor 10, on purpose.")


def make(seed):
    return {"steps": list(range(240))}


def right(step, peak_lr=2e-3, min_lr=2e-4, warmup=20, ends=(80, 160, 240), decay_frac=0.1):
    if step < warmup:
        return peak_lr * (step + 1) / warmup
    for end in ends:
        if step < end:
            span = round(decay_frac * end)
            x = max(0.0, (step - (end - span) + 1) / span)
            return 1.0 / (x / min_lr + (1 - x) / peak_lr)
    return min_lr


if __name__ == "__main__":
    want = []
    inv_p, inv_m = 1 / 2e-3, 1 / 2e-4
    for s in range(240):
        lr = 2e-3
        if s < 20:
            lr = 2e-3 * (s + 1) / 20
        for end, span in ((80, 8), (160, 16), (240, 24)):
            if end - span <= s < end:
                k = s - (end - span) + 1
                lr = 1 / (inv_p + k * (inv_m - inv_p) / span)
        want.append(lr)
    got = [right(s) for s in range(240)]
    print(got[0], got[19], got[71], got[79], got[80], got[239])
    assert max(abs(a / b - 1) for a, b in zip(got, want)) < 1e-9 and abs(got[79] - 2e-4) < 1e-12 and got[80] == 2e-3
