"""The learning rate differs between ranks because progress is local. karpathy/nanochat#857,
https://github.com/karpathy/nanochat/pull/857, 2026. In epoch-based SFT the multiplier follows how far the rank's own
packing loader has come in its share of the data. A rank that packs more short conversations is ahead and applies a
lower rate to the same averaged gradient, so the replicas drift apart a little at each step."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, from 0", "rank": "data-parallel rank",
          "consumed": "consumed[rank][step]: conversations that each rank's loader has consumed by that step"}
SETTINGS = {"share": "conversations in the share of one rank, 400", "warmdown": "part of the epoch with falling rate, the last 0.5"}
NOTES = ("Multiplier of the learning rate. Gradients are averaged over ranks before the step, so all ranks apply the same "
         "multiplier; progress is that of the furthest rank (an all-reduce with max).")
import random

def make(seed):
    rng = random.Random(seed)
    consumed = []
    for rank in range(4):
        total, track = 0, []
        for _ in range(40):
            total += rng.randint(7, 11)                # conversations packed into this step
            track.append(min(total, 400))
        consumed.append(track)
    return {"step": 30, "rank": 2, "consumed": consumed}

def _multiplier(progress, warmdown):
    progress = min(progress, 1.0)
    return 1.0 if progress < 1 - warmdown else 1.0 - (progress - (1 - warmdown)) / warmdown

def broken(step, rank, consumed, share=400, warmdown=0.5):
    return _multiplier(consumed[rank][step] / share, warmdown)

def right(step, rank, consumed, share=400, warmdown=0.5):
    return _multiplier(max(c[step] for c in consumed) / share, warmdown)

if __name__ == "__main__":
    d = make(0)
    rates = lambda f: [round(f(30, r, d["consumed"]), 4) for r in range(4)]
    print("multipliers of the ranks at step 30:", rates(broken), rates(right))
    assert len(set(rates(broken))) > 1 and len(set(rates(right))) == 1 and broken(**d) != right(**d)
