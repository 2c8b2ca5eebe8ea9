"""Bits per byte with bytes counted through decode and encode. karpathy/nanochat#693, https://github.com/karpathy/nanochat/pull/693, 2026.
The bytes of each token were counted as len(decode([id]).encode("utf-8")). A token whose bytes are not valid UTF-8 alone decodes to U+FFFD, which is three bytes.
The denominator was too large and validation bits per byte too low; nothing failed."""
import math
import random
import torch

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "one dict per rank: ids = token ids that the rank evaluated, [n]; nll = negative log likelihood of each in nats, [n]"}
SETTINGS = {}
NOTES = "Bits per byte of all ranks together: sum of nats / (ln 2 * sum of bytes). Byte-level BPE; a few tokens are parts of a character (not valid UTF-8 alone). Special tokens (0 bytes, id 0) count neither in the numerator nor in the denominator. Ranks may hold different numbers of tokens."
PIECES = [b"<special>", b"a", b"b", b" the", b" dog", b"ing", "é".encode(), b"\xf0\x9f", b"\x90", b"\x95", b"\xe2\x82", b"\xac", b"\n", b" love"]
SPECIAL = {0}


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)
    ranks = []
    for _ in range(3):
        n = rng.randint(20, 40)
        ranks.append({"ids": torch.randint(0, len(PIECES), (n,), generator=g), "nll": torch.rand(n, generator=g) * 4})
    return {"ranks": ranks}


def _bpb(ranks, table):
    nats = sum((r["nll"] * (table[r["ids"]] > 0)).sum().item() for r in ranks)     # all-reduce of both sums
    total = sum(table[r["ids"]].sum().item() for r in ranks)
    return nats / (math.log(2) * total)


def broken(ranks):
    table = torch.tensor([0 if i in SPECIAL else len(p.decode("utf-8", errors="replace").encode("utf-8")) for i, p in enumerate(PIECES)])
    return _bpb(ranks, table)


def right(ranks):
    table = torch.tensor([0 if i in SPECIAL else len(p) for i, p in enumerate(PIECES)])
    return _bpb(ranks, table)


def single(ids, nll):
    """The twin in one process: the text itself is joined and measured."""
    keep = [i for i in range(len(ids)) if int(ids[i]) not in SPECIAL]
    text = b"".join(PIECES[int(ids[i])] for i in keep)
    return sum(float(nll[i]) for i in keep) / (math.log(2) * len(text))


if __name__ == "__main__":
    ranks = make(0)["ranks"]
    one = single(torch.cat([r["ids"] for r in ranks]), torch.cat([r["nll"] for r in ranks]))
    print("broken", broken(ranks), "right", right(ranks), "twin", one)
    assert abs(right(ranks) - one) < 1e-5 and abs(broken(ranks) - one) > 1e-2
