"""Bits per byte over ranks (nanochat evaluate_bpb, lm-eval): the summed nats are divided by log(2) times the number of BYTES of the target tokens, not by the number of tokens; targets without bytes
(special tokens) are dropped from the numerator too."""
import math
import torch

FAMILY = "metrics over ranks or micro-batches"
KIND = "metric over ranks"
INPUTS = {"per_rank": "list over ranks; each a list of batches, each a dict nll [rows, time] (cross-entropy of each target in nats, from the model) and targets [rows, time] (token ids, -1 for ignored positions)",
          "token_bytes": "[vocab], number of UTF-8 bytes of each token; 0 for special tokens"}
SETTINGS = {}
NOTES = """Bits per byte of an evaluation set that is spread over ranks. Numerator: sum of nll over all targets of all batches of all ranks that are not ignored (>= 0) and whose token has at least one byte. Denominator: log(2) times the sum of the bytes of the same
targets. Sums are added over batches and ranks before the single division, so that the number depends neither on the split nor on the tokenizer's vocabulary size; special tokens and ignored positions count nowhere. No bytes at all: infinity. Equals `single_process` on the concatenated data."""


def make(seed):
    g = torch.Generator().manual_seed(seed)
    vocab = 20
    token_bytes = torch.randint(1, 7, (vocab,), generator=g); token_bytes[:3] = 0
    per_rank = []
    for n in (2, 3):
        bs = []
        for _ in range(n):
            t = torch.randint(0, vocab, (3, 8), generator=g); t[0, 5:] = -1
            bs.append({"nll": torch.rand(3, 8, generator=g) * 4, "targets": t})
        per_rank.append(bs)
    return {"per_rank": per_rank, "token_bytes": token_bytes}


def single_process(nll, targets, token_bytes):
    """Twin: one process, all positions, an explicit loop."""
    nats, size = 0.0, 0
    for x, t in zip(nll.tolist(), targets.tolist()):
        if t >= 0 and token_bytes[t] > 0:
            nats += x; size += int(token_bytes[t])
    return nats / (math.log(2) * size) if size else float("inf")


def right(per_rank, token_bytes):
    nats, size = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
    for batches in per_rank:
        for b in batches:
            t = b["targets"].flatten()
            n = torch.where(t >= 0, token_bytes[t.clamp(min=0)], torch.zeros_like(t))
            nats += (b["nll"].flatten() * (n > 0)).sum(dtype=torch.float64)
            size += n.sum()
    return float("inf") if size == 0 else nats.item() / (math.log(2) * size.item())


if __name__ == "__main__":
    i = make(0)
    flat = [b for r in i["per_rank"] for b in r]
    print(right(**i), "loop", single_process(torch.cat([b["nll"].flatten() for b in flat]), torch.cat([b["targets"].flatten() for b in flat]), i["token_bytes"]))
