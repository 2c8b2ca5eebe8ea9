"""Bits per byte over ranks: summed token loss in nats / ln 2 / number of UTF-8 BYTES of the scored text. The token count never enters, and the
denominators are not the number of terms in the numerator (The Pile, Gao et al. 2020; lm-evaluation-harness; nanochat). That makes it comparable across tokenizers."""
import math
import torch

FAMILY = "metrics over ranks or micro-batches"
KIND = "metric over ranks"
INPUTS = {"ranks": "list over ranks of dicts: nll [tokens] in nats, token_bytes [tokens] UTF-8 length of each target token; 0 for special tokens, which are then left out of both sums"}
SETTINGS = {}
NOTES = ("Sum of nll over tokens with at least one byte / (ln 2 * sum of bytes), both sums over all ranks before the division (a mean of rank values would be wrong). "
         "Sums in float64. Ranks may have different token counts, also none. inf if no bytes at all. Single-process twin: twin().")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    ranks = []
    for n in (7, 0, 19, 4):
        ranks.append({"nll": torch.rand(n, generator=g) * 6, "token_bytes": torch.randint(0, 8, (n,), generator=g)})
    return {"ranks": ranks}


def right(ranks):
    nats, size = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for r in ranks:                                               # all-reduce SUM of two numbers
        real = r["token_bytes"] > 0
        nats += r["nll"][real].double().sum()
        size += r["token_bytes"].sum()
    return (nats / (math.log(2) * size)).item() if size > 0 else float("inf")


def twin(ranks):
    nll = torch.cat([r["nll"] for r in ranks]).tolist()
    size = torch.cat([r["token_bytes"] for r in ranks]).tolist()
    bits = sum(x / math.log(2) for x, b in zip(nll, size) if b)
    return bits / sum(size) if sum(size) else float("inf")


if __name__ == "__main__":
    for seed in range(3):
        d = make(seed)
        print(right(d["ranks"]), twin(d["ranks"]))
        assert abs(right(d["ranks"]) - twin(d["ranks"])) < 1e-9
        assert abs(right(d["ranks"][::-1]) - right(d["ranks"])) < 1e-12
    uniform = [{"nll": torch.full((5,), 8 * math.log(2)), "token_bytes": torch.ones(5, dtype=torch.long)}] * 2
    assert abs(right(uniform) - 8.0) < 1e-6                       # a byte model that knows nothing needs 8 bits
