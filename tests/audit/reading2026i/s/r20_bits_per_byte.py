"""Bits per byte over ranks (nanochat, The Pile, lm-evaluation-harness): the summed loss of the tokens is divided by the number of BYTES of the text and by ln 2, so the denominator has nothing to do with the number of targets. Tokens that stand for no bytes (special tokens) are left out of the numerator too. Ranks add up sums and byte
counts before the one division; a rank without a counted token gives 0/0 alone but is harmless here."""
import math
import torch

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "list over ranks of lists of batches {'nll': loss per target in nats [rows, time], 'labels': target ids [rows, time], -100 = ignored}", "token_bytes": "number of bytes of each id, 0 for special tokens, [vocab]"}
SETTINGS = {}
NOTES = "sum of nll over targets with bytes > 0, divided by ln 2 and by the sum of their bytes, over all ranks. Independent of the tokenizer by design. single_process is the twin."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    token_bytes = torch.randint(1, 6, (50,), generator=g)
    token_bytes[:4] = 0
    ranks = []
    for rank in range(3):
        batches = []
        for _ in range(2):
            labels = torch.randint(0, 50, (2, 6 + rank), generator=g)
            labels[torch.rand(labels.shape, generator=g) < 0.2] = -100
            if rank == 2:
                labels[:] = -100
            batches.append({"nll": torch.rand(labels.shape, generator=g) * 4, "labels": labels})
        ranks.append(batches)
    return {"ranks": ranks, "token_bytes": token_bytes}


def right(ranks, token_bytes):
    nats, total = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
    for batches in ranks:
        own_nats, own_bytes = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
        for b in batches:
            size = torch.where(b["labels"] >= 0, token_bytes[b["labels"].clamp(min=0)], torch.zeros_like(b["labels"]))
            own_nats += (b["nll"].double() * (size > 0)).sum()
            own_bytes += size.sum()
        nats, total = nats + own_nats, total + own_bytes            # all-reduce, sum
    return (nats / (math.log(2) * total)).item()


def single_process(ranks, token_bytes):
    nats = count = 0.0
    for b in (b for r in ranks for b in r):
        for loss, label in zip(b["nll"].flatten().tolist(), b["labels"].flatten().tolist()):
            if label >= 0 and token_bytes[label] > 0:
                nats, count = nats + loss, count + int(token_bytes[label])
    return nats / count / math.log(2)


if __name__ == "__main__":
    d = make(0)
    print("ranks", right(**d), "one process", single_process(**d))
    assert abs(right(**d) - single_process(**d)) < 1e-6
