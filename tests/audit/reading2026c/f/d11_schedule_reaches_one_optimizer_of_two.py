"""The schedule moves only the first of two wrapped optimizers. tenstorrent/tt-metal#56027, https://github.com/tenstorrent/tt-metal/issues/56027, 2026.
The wrapper that gives matrices to Muon and all else to AdamW answers get_lr and set_lr for Muon alone. Schedulers and trainers treat it as an optimizer with one
rate, so embeddings, norms and head train at AdamW's constant base rate: no warmup, no decay."""
import math
import torch

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "index of the optimizer update, 0 ... 59"}
SETTINGS = {"part": "whose rate is returned, 'adamw' (or 'muon')", "muon_lr": "base rate of the matrices, 0.02", "adamw_lr": "base rate of the others, 0.0003",
            "warmup": "warmup updates, 10", "total": "updates, 60"}
NOTES = "Warmup by (step + 1) / warmup, then cosine to 0 at the end; both parts share the shape and keep the ratio of their base rates."

class TwoPart:
    """Stand-in for Muon is SGD with momentum; only the rates matter here."""
    def __init__(self, muon_lr, adamw_lr):
        self.muon = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, 2))], lr=muon_lr, momentum=0.95)
        self.adamw = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=adamw_lr)

    def get_lr(self):
        return self.muon.param_groups[0]["lr"]

    def set_lr(self, lr):
        self.muon.param_groups[0]["lr"] = lr

class TwoPartScaled(TwoPart):
    def __init__(self, muon_lr, adamw_lr):
        super().__init__(muon_lr, adamw_lr)
        self.ratio = adamw_lr / muon_lr

    def set_lr(self, lr):
        self.muon.param_groups[0]["lr"] = lr
        self.adamw.param_groups[0]["lr"] = lr * self.ratio

class Cosine:
    def __init__(self, optimizer, warmup, total):
        self.optimizer, self.base, self.warmup, self.total = optimizer, optimizer.get_lr(), warmup, total

    def at(self, step):
        if step < self.warmup:
            factor = (step + 1) / self.warmup
        else:
            factor = 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / (self.total - self.warmup)))
        self.optimizer.set_lr(self.base * factor)

def make(seed):
    return {"step": 40 + seed % 10}

def rate(cls, step, part, muon_lr, adamw_lr, warmup, total):
    optimizer = cls(muon_lr, adamw_lr)
    schedule = Cosine(optimizer, warmup, total)
    for s in range(step + 1):
        schedule.at(s)
    return getattr(optimizer, part).param_groups[0]["lr"]

def broken(step, part="adamw", muon_lr=0.02, adamw_lr=3e-4, warmup=10, total=60):
    return rate(TwoPart, step, part, muon_lr, adamw_lr, warmup, total)

def right(step, part="adamw", muon_lr=0.02, adamw_lr=3e-4, warmup=10, total=60):
    return rate(TwoPartScaled, step, part, muon_lr, adamw_lr, warmup, total)

if __name__ == "__main__":
    for step in (0, 9, 40, 59):
        print(step, "adamw: broken", broken(step), "right", right(step), "muon:", broken(step, part="muon"), right(step, part="muon"))
        assert broken(step, part="muon") == right(step, part="muon")
    assert broken(**make(0)) == 3e-4 and right(**make(0)) < 2e-4
