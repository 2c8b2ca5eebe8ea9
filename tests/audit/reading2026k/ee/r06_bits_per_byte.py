"""Bits per byte: summed nats over ranks divided by ln 2 times the summed bytes. nanochat evaluate_bpb, The Pile, lm-evaluation-harness bits_per_byte.
The denominator is not the number of tokens: each target token counts with the number of its UTF-8 bytes, so that values compare across tokenizers. Tokens with 0 bytes (special tokens) are left out of the
numerator too, as are ignored targets. The value is neither a mean of the rank values nor a mean over tokens."""
import math
import random

FAMILY = "metrics over ranks or micro-batches"
KIND = "metric over ranks"
INPUTS = {"parts": "list with one dict per rank: nats (cross-entropy of each target token), target (its token id, -1 = ignored)", }
SETTINGS = {"token_bytes": "list with the number of UTF-8 bytes of each token id, (0, 1, 2, 3, 4, 5, 1, 7); 0 for special tokens"}
NOTES = "sum of nats over counted targets of all ranks / (ln 2 * sum of their bytes); a target counts if it is not -1 and its token has bytes; infinity if there are no bytes."


def make(seed):
    rng = random.Random(seed)
    parts = []
    for n in (6, 9, 4):
        parts.append({"nats": [rng.expovariate(0.5) for _ in range(n)], "target": [rng.randrange(-1, 8) for _ in range(n)]})
    return {"parts": parts}


def right(parts, token_bytes=(0, 1, 2, 3, 4, 5, 1, 7)):
    nats = num = 0.0
    for p in parts:                                         # all_reduce of the two sums
        for loss, target in zip(p["nats"], p["target"]):
            size = token_bytes[target] if target >= 0 else 0
            nats += loss * (size > 0)
            num += size
    return nats / (math.log(2) * num) if num else math.inf


if __name__ == "__main__":
    case = make(0)
    sizes = (0, 1, 2, 3, 4, 5, 1, 7)
    rows = [(l, sizes[t]) for p in case["parts"] for l, t in zip(p["nats"], p["target"]) if t >= 0 and sizes[t] > 0]
    ref = sum(l for l, _ in rows) / math.log(2) / sum(b for _, b in rows)
    print(right(**case), ref, "counted", len(rows), "of", sum(len(p["target"]) for p in case["parts"]))
    assert abs(right(**case) - ref) < 1e-12
