"""EMA of the weights that starts at ZERO and is divided by 1 - decay^t only when read, as Adam does with its moments. The stored buffers are not the weights; the raw sums and the count must be saved, and the debiased copy must not be (Adam, Kingma and Ba 2015; Karras' and optax's debiased EMA)."""
import io
import torch
import torch.nn as nn

FAMILY = "moving averages"
KIND = "state"
INPUTS = {"model": "the module that is averaged", "steps": "number of updates"}
SETTINGS = {"decay": "0.9"}
NOTES = "state_dict holds raw sums and the count. Reading before the first update gives the model's own weights. Floating tensors only; kept in float32; buffers of the model not averaged."


class DebiasedEMA:
    def __init__(self, model, decay=0.9):
        self.model, self.decay, self.count = model, decay, 0
        self.raw = {n: torch.zeros_like(p, dtype=torch.float32) for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self):
        self.count += 1
        for n, p in self.model.named_parameters():
            self.raw[n].mul_(self.decay).add_(p.float(), alpha=1 - self.decay)

    def weights(self):
        if self.count == 0:
            return {n: p.detach().clone() for n, p in self.model.named_parameters()}
        c = 1 - self.decay ** self.count
        return {n: r / c for n, r in self.raw.items()}

    def state_dict(self):
        return {"count": self.count, "raw": {n: r.clone() for n, r in self.raw.items()}}

    def load_state_dict(self, s):
        self.count = s["count"]
        self.raw = {n: r.clone() for n, r in s["raw"].items()}


def make(seed):
    torch.manual_seed(seed)
    return {"model": nn.Linear(3, 2), "steps": 5}


def right(model, steps, decay=0.9):
    """runs, saves in the middle, resumes in a new object; returns it and the seen weights"""
    ema, seen = DebiasedEMA(model, decay), []
    for k in range(steps):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        seen.append(model.weight.detach().clone())
        ema.update()
        if k == steps // 2:
            f = io.BytesIO()
            torch.save(ema.state_dict(), f)
            f.seek(0)
            ema = DebiasedEMA(model, decay)
            ema.load_state_dict(torch.load(f))
    return ema, seen


if __name__ == "__main__":
    ema, seen = right(**make(0))
    w = [0.9 ** (len(seen) - 1 - k) for k in range(len(seen))]
    want = sum(a * x for a, x in zip(w, seen)) / sum(w)
    assert torch.allclose(ema.weights()["weight"], want, atol=1e-6)
    print("ok", ema.weights()["weight"][0].tolist(), want[0].tolist())
