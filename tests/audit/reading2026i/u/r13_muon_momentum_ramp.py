"""Momentum of Muon is scheduled, up and down again (modded-nanogpt). It rises linearly from 0.85 to 0.95 over the first 300 steps and falls back to 0.85 over the last 50. The value is not a learning rate: it rises during warm-up, never reaches 0, and in the last steps moves the other way than usual tunings."""
import random

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, 0 .. total"}
SETTINGS = {"low": "lowest momentum, 0.85", "high": "highest momentum, 0.95", "warmup": "steps of the rise, 300", "cooldown": "steps of the fall at the end, 50", "total": "all steps, 2000"}
NOTES = "Momentum coefficient of the Muon optimizer, not a rate. Linear between low and high. warmup + cooldown <= total."


def make(seed):
    return {"step": random.Random(seed).randint(0, 2000), "low": 0.85, "high": 0.95, "warmup": 300, "cooldown": 50, "total": 2000}


def right(step, low=0.85, high=0.95, warmup=300, cooldown=50, total=2000):
    if step < warmup:
        f = step / warmup
    elif step > total - cooldown:
        f = (total - step) / cooldown
    else:
        f = 1.0
    return (1 - f) * low + f * high


if __name__ == "__main__":
    v = [right(s) for s in range(2001)]
    assert abs(v[0] - 0.85) < 1e-12 and abs(v[150] - 0.9) < 1e-12 and all(abs(x - 0.95) < 1e-12 for x in v[300:1951]) and abs(v[2000] - 0.85) < 1e-12
    print(v[0], v[150], v[1000], v[1975], v[2000])
