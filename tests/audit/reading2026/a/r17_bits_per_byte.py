"""Bits per byte over ranks: the sum of nats is divided by bytes, not by tokens.
Special tokens have 0 bytes; they count neither in the numerator nor in the denominator, although the model is trained on them.
The ratio is taken after both sums were reduced over ranks."""
import math
import torch
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"per_rank": "list with one dict per rank: 'nll' [rows, time] nats per target, 'targets' [rows, time] ids, -1 where there is no target",
          "token_bytes": "number of bytes of each id, 0 for special tokens, [vocabulary]"}
SETTINGS = {}
NOTES = "Bits per byte of the evaluation text; independent of the tokenizer. Leaving out targets with 0 bytes is intended."

def make(seed):
    g = torch.Generator().manual_seed(seed)
    token_bytes = torch.randint(1, 7, (30,), generator=g)
    token_bytes[:3] = 0
    out = []
    for rank in range(3):
        targets = torch.randint(0, 30, (2 + rank, 12), generator=g)
        targets[:, 10 - rank:] = -1
        out.append({"nll": torch.rand(2 + rank, 12, generator=g) * 3, "targets": targets})
    return {"per_rank": out, "token_bytes": token_bytes}

def right(per_rank, token_bytes):
    nats, size = 0.0, 0
    for r in per_rank:
        b = torch.where(r["targets"] >= 0, token_bytes[r["targets"].clamp(min=0)], 0)
        nats, size = nats + (r["nll"] * (b > 0)).sum().item(), size + b.sum().item()
    return nats / (math.log(2) * size)

def single(per_rank, token_bytes):
    nats = size = 0
    for r in per_rank:
        for x, t in zip(r["nll"].flatten().tolist(), r["targets"].flatten().tolist()):
            if t >= 3:
                nats, size = nats + x, size + int(token_bytes[t])
    return nats / size / math.log(2)

if __name__ == "__main__":
    d = make(0)
    print(right(**d), "one process:", single(**d))
    assert abs(right(**d) - single(**d)) < 1e-6
