"""Validation loss is divided by the number of bytes, not of tokens, and by log 2; ranks are not averaged.
Right: bits per byte, comparable between tokenizers: all losses are summed, all bytes are summed, one division. Special tokens have 0 bytes, and their loss is left out as well."""
import math
import torch

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "one dict for each rank: nll [tokens] in nats, nbytes [tokens] (UTF-8 bytes of the target, 0 for special tokens)"}
SETTINGS = {}
NOTES = "sum of nll over targets with bytes / (log 2 * sum of bytes), over all ranks. Infinite if there are no bytes."


def right(ranks):
    nats = sum(float((r["nll"].double() * (r["nbytes"] > 0)).sum()) for r in ranks)
    size = sum(int(r["nbytes"].sum()) for r in ranks)
    return nats / (math.log(2) * size) if size else float("inf")


def twin(ranks):
    """One process, one token at a time."""
    bits = size = 0.0
    for r in ranks:
        for v, b in zip(r["nll"].tolist(), r["nbytes"].tolist()):
            if b > 0:
                bits += v / math.log(2)
                size += b
    return bits / size


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"ranks": [{"nll": torch.rand(n, generator=g) * 5, "nbytes": torch.randint(0, 7, (n,), generator=g)} for n in (20, 3, 11)]}


if __name__ == "__main__":
    x = make(0)
    print("bits per byte", right(**x), "twin", twin(**x))
    assert abs(right(**x) - twin(**x)) < 1e-6
