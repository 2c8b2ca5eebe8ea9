"""Layer-wise lr decay leaves min_lr unscaled. YalaLab/pillar-finetune#6, https://github.com/YalaLab/pillar-finetune/pull/6, 2026.
Layer-wise decay multiplied the base lr of each lower layer, but the cosine still ended at the min_lr of the top layer. The lower layers so end at a share of their own peak that is too high,
and the lowest ones even grow during the decay. The BEiT code keeps an lr_scale and multiplies the finished schedule with it."""
import math
import random

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, 0 .. total"}
SETTINGS = {"layer": "index of the layer, 0 lowest, 4 of 0..12", "num_layers": "12 (the head is layer 12)", "layer_decay": "0.65", "lr": "peak of the top layer, 1e-3", "min_lr": "end of the top layer, 2e-5",
            "warmup": "10 steps, linear from 0", "total": "100 steps"}
NOTES = "Learning rate of one layer: linear warmup, then cosine to the minimum. All layers have the same shape of curve; layer l is layer_decay ** (num_layers - l) times the top layer at each step."


def make(seed):
    return {"step": random.Random(seed).randint(60, 100)}


def _curve(step, lr, min_lr, warmup, total):
    if step < warmup:
        return lr * step / warmup
    return min_lr + 0.5 * (lr - min_lr) * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def broken(step, layer=4, num_layers=12, layer_decay=0.65, lr=1e-3, min_lr=2e-5, warmup=10, total=100):
    scale = layer_decay ** (num_layers - layer)
    return _curve(step, lr * scale, min_lr, warmup, total)


def right(step, layer=4, num_layers=12, layer_decay=0.65, lr=1e-3, min_lr=2e-5, warmup=10, total=100):
    scale = layer_decay ** (num_layers - layer)
    return scale * _curve(step, lr, min_lr, warmup, total)


if __name__ == "__main__":
    d = make(0)
    print(d, "broken", broken(**d), "right", right(**d))
    for layer in (12, 8, 4, 0):
        print(layer, "end / peak: broken", broken(100, layer=layer) / broken(10, layer=layer), "right", right(100, layer=layer) / right(10, layer=layer))
    assert abs(broken(**d) / right(**d) - 1) > 0.1 and math.isclose(right(100, layer=0) / right(10, layer=0), 0.02)
