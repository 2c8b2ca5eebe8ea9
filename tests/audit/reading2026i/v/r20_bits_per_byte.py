"""Bits per byte over ranks. To compare tokenizers (nanochat, The Pile's evaluation) the loss is not averaged over tokens: the
sum of nats over tokens is divided by ln 2 times the sum of the tokens' bytes. Special tokens have 0 bytes and are left
out of the sum of nats as well; ignored targets are -1. Both sums are reduced over ranks before the division."""
import math
import torch
import torch.nn.functional as F

FAMILY = "metrics over ranks or micro-batches"
KIND = "metric over ranks"
INPUTS = {"per_rank": "list over ranks; each a list of batches {'logits': [rows, time, vocab], 'targets': [rows, time], -1 is ignored}",
          "token_bytes": "number of UTF-8 bytes of each token, 0 for special tokens [vocab]"}
SETTINGS = {}
NOTES = ("Total nats / (ln 2 * total bytes) over all ranks and batches. The denominator counts bytes, not tokens. A target with "
         "0 bytes adds to neither sum. Ranks may hold unequally many batches. Infinite if there are no bytes at all.")


def make(seed):
    torch.manual_seed(seed)
    vocab = 20
    token_bytes = torch.randint(1, 7, (vocab,))
    token_bytes[:2] = 0
    per_rank = []
    for batches in (2, 3):
        rank = []
        for _ in range(batches):
            targets = torch.randint(0, vocab, (2, 7))
            targets[torch.rand(2, 7) < 0.2] = -1
            rank.append({"logits": torch.randn(2, 7, vocab), "targets": targets})
        per_rank.append(rank)
    return {"per_rank": per_rank, "token_bytes": token_bytes}


def right(per_rank, token_bytes):
    nats, total = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
    for rank in per_rank:                               # sums per rank, then all-reduce SUM of both
        for b in rank:
            y = b["targets"].reshape(-1)
            loss = F.cross_entropy(b["logits"].flatten(0, 1), y, ignore_index=-1, reduction="none")
            size = torch.where(y >= 0, token_bytes[y.clamp(min=0)], torch.zeros_like(y))
            nats += (loss * (size > 0)).sum().double()
            total += size.sum()
    return (nats / (math.log(2) * total)).item() if total > 0 else float("inf")


def single_process(per_rank, token_bytes):
    bits, total = 0.0, 0
    for b in (b for rank in per_rank for b in rank):
        lp = b["logits"].log_softmax(-1)
        for i in range(2):
            for t in range(7):
                y = int(b["targets"][i, t])
                if y >= 0 and token_bytes[y] > 0:
                    bits += -lp[i, t, y].item() / math.log(2)
                    total += int(token_bytes[y])
    return bits / total


if __name__ == "__main__":
    d = make(0)
    print(right(**d), single_process(**d))
    assert abs(right(**d) - single_process(**d)) < 1e-5
