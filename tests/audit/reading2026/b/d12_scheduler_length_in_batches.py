"""The scheduler's length is counted in training batches, but it steps once for each mini-batch. NovaSky-AI/SkyRL#873 (issue #872),
https://github.com/NovaSky-AI/SkyRL/pull/873, 2026.
Each training batch holds train_batch_size / mini_batch_size optimizer steps and scheduler.step() follows each of them; num_training_steps was the
number of training batches. The cosine falls too fast, and past its end the formula climbs again."""
import math
import torch

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"optimizer": "torch optimizer", "dataset_size": "prompts in the data"}
SETTINGS = {"train_batch_size": "128", "mini_batch_size": "prompts for each optimizer step, 64", "epochs": "2", "warmup_steps": "optimizer steps, 4"}
NOTES = ("Makes a torch scheduler that is stepped after each optimizer step: linear warmup, then half a cosine to 0 over all optimizer steps of the run "
         "(epochs * batches * mini-batches for each batch).")


def _cosine(optimizer, warmup, total):
    def f(s):
        if s < warmup:
            return s / max(1, warmup)
        p = (s - warmup) / max(1, total - warmup)
        return max(0.0, 0.5 * (1 + math.cos(math.pi * p)))
    return torch.optim.lr_scheduler.LambdaLR(optimizer, f)


def broken(optimizer, dataset_size, train_batch_size=128, mini_batch_size=64, epochs=2, warmup_steps=4):
    batches = dataset_size // train_batch_size
    return _cosine(optimizer, warmup_steps, batches * epochs)


def right(optimizer, dataset_size, train_batch_size=128, mini_batch_size=64, epochs=2, warmup_steps=4):
    batches = dataset_size // train_batch_size
    return _cosine(optimizer, warmup_steps, batches * epochs * (train_batch_size // mini_batch_size))


def make(seed):
    p = torch.nn.Parameter(torch.zeros(1))
    return {"optimizer": torch.optim.SGD([p], lr=0.1), "dataset_size": 1280 + 128 * seed}


if __name__ == "__main__":
    out = {}
    for n, f in (("broken", broken), ("right", right)):
        x = make(0)
        s = f(**x)
        lrs = []
        for _ in range(2 * 10 * 2):
            lrs.append(s.get_last_lr()[0])
            x["optimizer"].step()
            s.step()
        out[n] = lrs
        print(n, [round(v, 4) for v in lrs[::4]], "last", round(lrs[-1], 5))
    assert out["broken"] != out["right"] and out["right"][-1] < 0.002 < out["broken"][-1]
