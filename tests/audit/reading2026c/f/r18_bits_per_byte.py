"""Right: bits per byte. The summed loss of all ranks is divided by the number of bytes of the text, not by the number of tokens, and by ln 2; special tokens have zero bytes and are left out of the numerator too. Two tokenizers can be compared; the number is far below the token loss."""
import math
import torch

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "per rank {nll: loss of each target token in nats, [rows, time]; target: token ids, -1 on padding, [rows, time]}"}
SETTINGS = {}
NOTES = "BYTES gives the bytes of each token (0 for special tokens 0-3). Sum of nll over tokens with bytes, over ln 2 times the sum of their bytes, over all ranks. Ranks hold different numbers of tokens."
BYTES = torch.tensor([0] * 4 + [1 + i % 7 for i in range(46)])

def make(seed):
    g = torch.Generator().manual_seed(seed)
    ranks = []
    for rows in (3, 5):
        target = torch.randint(0, 50, (rows, 12), generator=g)
        target[torch.arange(12)[None] >= torch.randint(6, 13, (rows, 1), generator=g)] = -1
        ranks.append({"nll": 3 * torch.rand(rows, 12, generator=g), "target": target})
    return {"ranks": ranks}

def right(ranks):
    nats = size = 0.0
    for r in ranks:
        count = BYTES[r["target"].clamp(min=0)] * (r["target"] >= 0)
        nats += float((r["nll"] * (count > 0)).sum())
        size += float(count.sum())
    return nats / (math.log(2) * size)

def twin(ranks):
    """Single process: token by token."""
    nats = size = 0.0
    for r in ranks:
        for nll, token in zip(r["nll"].flatten().tolist(), r["target"].flatten().tolist()):
            if token >= 4:
                nats, size = nats + nll, size + int(BYTES[token])
    return nats / math.log(2) / size

if __name__ == "__main__":
    made = make(0)
    print("right", right(**made), "single process", twin(**made))
    assert abs(right(**made) - twin(**made)) < 1e-5
