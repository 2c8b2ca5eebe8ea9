"""Bits per byte over ranks: nats are summed over tokens, divided by bytes, not by tokens. nanochat's evaluate_bpb.
Special tokens have length 0 bytes; they are left out of the numerator as well as of the denominator. Ranks add two sums; a rank may have no counted token at all. The value does not depend on the tokenizer."""
import math
import torch
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "list over ranks of dicts: nll (nats per target token, [tokens]), target (target ids, -1 = ignored, [tokens])", "token_bytes": "bytes of each token of the vocabulary, 0 for special tokens, [vocab] (a module constant here)"}
SETTINGS = {}
NOTES = "total nats of counted tokens of all ranks / (ln 2 * total bytes of counted tokens of all ranks). Counted: target >= 0 and token_bytes > 0. Rank token counts differ. inf if there are no bytes at all. Single-process twin: the same on the joined list. Any number of ranks."
TOKEN_BYTES = torch.tensor([0, 0, 0] + [1 + i % 6 for i in range(47)])


def make(seed):
    g = torch.Generator().manual_seed(seed)
    ranks = []
    for n in (12, 5, 9):
        ranks.append({"nll": 4 * torch.rand(n, generator=g), "target": torch.randint(-1, 50, (n,), generator=g)})
    ranks.append({"nll": torch.rand(3, generator=g), "target": torch.tensor([-1, 0, 2])})
    return {"ranks": ranks}


def single(nll, target):
    nats = size = 0.0
    for x, t in zip(nll.tolist(), target.tolist()):
        if t >= 0 and TOKEN_BYTES[t] > 0:
            nats += x
            size += int(TOKEN_BYTES[t])
    return nats / (math.log(2) * size)


def right(ranks):
    total = torch.zeros(2, dtype=torch.float64)
    for r in ranks:
        b = torch.where(r["target"] >= 0, TOKEN_BYTES[r["target"].clamp(min=0)], 0)
        total += torch.stack([(r["nll"] * (b > 0)).sum().double(), b.sum().double()])        # all_reduce(SUM)
    return (total[0] / (math.log(2) * total[1])).item() if total[1] > 0 else float("inf")


if __name__ == "__main__":
    ranks = make(0)["ranks"]
    got, want = right(ranks), single(torch.cat([r["nll"] for r in ranks]), torch.cat([r["target"] for r in ranks]))
    print(got, want)
    assert abs(got - want) < 1e-5
