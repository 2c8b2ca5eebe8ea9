"""Warmup length from floor division although the trailing partial window also steps. natolambert/rlhf-book#354,
https://github.com/natolambert/rlhf-book/pull/354, 2026. The reward-model loop takes an optimizer step on the last,
incomplete accumulation window of each epoch, but the number of optimizer steps was num_batches // accum * epochs, up to
one too few per epoch. The warmup (10 % of the run) was therefore shorter than asked for; the fix rounds up."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"optimizer": "torch optimizer whose groups hold the peak LR"}
SETTINGS = {"num_batches": "micro-batches of an epoch, 36", "accum": "micro-batches per optimizer step, 16",
            "epochs": "epochs, 20", "warmup_ratio": "share of all optimizer steps, 0.1"}
NOTES = ("Makes a torch scheduler that is stepped after each optimizer step: linear warmup over warmup_ratio of all "
         "optimizer steps of the run, then constant. The loop steps the optimizer every `accum` micro-batches and once "
         "more at the end of an epoch if micro-batches are left.")
import torch


def make(seed):
    p = torch.nn.Parameter(torch.zeros(3))
    return {"optimizer": torch.optim.SGD([p], lr=0.1 + 0.01 * seed)}


def _warmup(optimizer, steps):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / max(1, steps)))


def broken(optimizer, num_batches=36, accum=16, epochs=20, warmup_ratio=0.1):
    total = num_batches // accum * epochs
    return _warmup(optimizer, int(warmup_ratio * total))


def right(optimizer, num_batches=36, accum=16, epochs=20, warmup_ratio=0.1):
    total = -(-num_batches // accum) * epochs
    return _warmup(optimizer, int(warmup_ratio * total))


if __name__ == "__main__":
    curves = []
    for fn in (broken, right):
        opt = make(0)["optimizer"]
        sched = fn(opt)
        curve = []
        for _ in range(8):
            curve.append(round(opt.param_groups[0]["lr"], 4))
            opt.step()
            sched.step()
        curves.append(curve)
        print(fn.__name__, curve)
    assert curves[0] != curves[1]
