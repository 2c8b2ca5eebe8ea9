"""Warmup and cosine horizons in optimizer steps, scheduler advanced once per epoch. galilai-group/stable-worldmodel#280,
https://github.com/galilai-group/stable-worldmodel/issues/280, 2026. The training scripts set warmup_steps and max_steps of the
linear-warmup-cosine scheduler to counts of optimizer steps (max_epochs * len(train)), but registered the scheduler with
interval='epoch'. The counter that the curve sees is then the epoch number, so the run stays at the foot of the warmup and
never decays; nothing fails."""
import math

FAMILY = "schedules, updates, and saved or cached state"
KIND = "schedule"
INPUTS = {"step": "number of optimizer updates done so far, from 0 (first update) to epochs * steps_per_epoch - 1 (last update)"}
SETTINGS = {"peak_lr": "peak learning rate, 1e-3", "min_lr": "final learning rate, 1e-5", "epochs": "number of epochs, 4",
            "steps_per_epoch": "optimizer steps in an epoch, 50", "warmup_frac": "part of all optimizer steps spent in warmup, 0.05"}
NOTES = ("Linear warmup from 0 at step 0 to peak_lr at step warmup_frac * total (10 of 200), then half a cosine from peak_lr to min_lr, "
         "which would be reached at step total = epochs * steps_per_epoch = 200. total and warmup count optimizer steps.")


def make(seed):
    return {"steps": list(range(200))}


def _curve(t, peak_lr, min_lr, warmup, total):
    if t < warmup:
        return peak_lr * t / warmup
    x = (t - warmup) / (total - warmup)
    return min_lr + 0.5 * (peak_lr - min_lr) * (1 + math.cos(math.pi * x))


def broken(step, peak_lr=1e-3, min_lr=1e-5, epochs=4, steps_per_epoch=50, warmup_frac=0.05):
    total = epochs * steps_per_epoch
    warmup = max(1, int(warmup_frac * total))
    epoch = step // steps_per_epoch
    return _curve(epoch, peak_lr, min_lr, warmup, total)


def right(step, peak_lr=1e-3, min_lr=1e-5, epochs=4, steps_per_epoch=50, warmup_frac=0.05):
    total = epochs * steps_per_epoch
    warmup = max(1, int(warmup_frac * total))
    return _curve(step, peak_lr, min_lr, warmup, total)


if __name__ == "__main__":
    for s in (0, 5, 10, 60, 120, 199):
        print(s, broken(s), right(s))
    assert max(broken(s) for s in make(0)["steps"]) < 0.5e-3 and abs(right(10) - 1e-3) < 1e-12 and right(199) < 2e-5
