"""Validation loss in bits per byte: the divisor counts bytes, not tokens. nanochat evaluate_bpb; The Pile.
nats are summed over targets whose byte length is above 0; special tokens have length 0 and drop out of numerator AND denominator. Both sums go over ranks before the division. The result does not depend on the tokenizer, and is no perplexity."""
import math
import torch
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "one dict per rank: nll (loss of each target in nats, [n]), targets (ids, -100 = ignored, [n]), token_bytes (bytes of each id of the vocabulary, 0 for special ids, [vocab])"}
SETTINGS = {}
NOTES = "sum(nll of targets with bytes > 0) / (ln 2 * sum of their bytes), over all ranks. Ranks may hold different numbers of targets, also none. No targets at all: infinity. Single-process twin: single(nll, targets, token_bytes)."

def make(seed):
    g = torch.Generator().manual_seed(seed); tb = torch.randint(1, 8, (40,), generator=g); tb[:4] = 0; ranks = []
    for n in (30, 7, 0, 19):
        t = torch.randint(0, 40, (n,), generator=g); t[torch.rand(n, generator=g) < 0.2] = -100
        ranks.append({"nll": 4 * torch.rand(n, generator=g), "targets": t, "token_bytes": tb})
    return {"ranks": ranks}

def sums(nll, targets, token_bytes):
    b = torch.where(targets >= 0, token_bytes[targets.clamp(min=0)], 0)
    return (nll.double() * (b > 0)).sum().item(), b.sum().item()

def right(ranks):
    parts = [sums(**r) for r in ranks]
    nats, n = sum(p[0] for p in parts), sum(p[1] for p in parts)      # two all-reduce SUMs
    return nats / (math.log(2) * n) if n else float("inf")

def single(nll, targets, token_bytes):
    nats, n = 0.0, 0
    for l, t in zip(nll.tolist(), targets.tolist()):
        if t >= 0 and token_bytes[t] > 0:
            nats += l; n += int(token_bytes[t])
    return nats / math.log(2) / n

if __name__ == "__main__":
    r = make(0)["ranks"]; one = single(torch.cat([x["nll"] for x in r]), torch.cat([x["targets"] for x in r]), r[0]["token_bytes"])
    print(right(r), one); assert abs(right(r) - one) < 1e-9
