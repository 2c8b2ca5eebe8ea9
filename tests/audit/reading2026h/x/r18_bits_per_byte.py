"""Bits per byte: nats of all tokens over bytes of all tokens, special tokens in neither (nanochat evaluate_bpb, lm-evaluation-harness).
The denominator is bytes of text, not tokens. A special token has zero bytes; its loss is left out, too, or it would be free to be bad. Ignored targets
(-1) count nothing. Sums are reduced over ranks before the one division; there is no mean of means and no exp."""
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "per rank a dict: nll in nats of each target [tokens], targets (ids, -1 is ignored) [tokens], bytes (table of the bytes of each id, 0 for special ids, the same on all ranks) [vocabulary]"}
SETTINGS = {}
NOTES = ("Sum of nats over (ln 2 times sum of bytes), over all counted tokens of all ranks; infinity if no byte is counted. Ranks have different numbers of tokens, one may have none counted. "
         "Ids 0, 1, 2 are special. `twin` is the single-process value.")
import math
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    table = torch.randint(1, 9, (40,), generator=g)
    table[:3] = 0
    def rank(n):
        t = torch.randint(0, 40, (n,), generator=g)
        t[torch.rand(n, generator=g) < 0.2] = -1
        return {"nll": torch.rand(n, generator=g) * 5, "targets": t, "bytes": table}
    return {"ranks": [rank(30), rank(17), rank(3)]}


def right(ranks):
    nats, size = 0.0, 0
    for r in ranks:
        valid = r["targets"] >= 0
        n = torch.where(valid, r["bytes"][r["targets"].clamp(min=0)], torch.zeros_like(r["targets"]))
        nats += (r["nll"] * (n > 0)).sum().item()              # all-reduce, sum
        size += int(n.sum())                                   # all-reduce, sum
    return nats / (math.log(2) * size) if size else float("inf")


def twin(ranks):
    return right([{k: (torch.cat([r[k] for r in ranks]) if k != "bytes" else ranks[0]["bytes"]) for k in ("nll", "targets", "bytes")}])


if __name__ == "__main__":
    d = make(0)["ranks"]
    a = b = 0.0
    for r in d:
        for nll, t in zip(r["nll"].tolist(), r["targets"].tolist()):
            if t >= 3:
                a += nll
                b += r["bytes"][t].item()
    print(right(d), twin(d), a / b / math.log(2))
    assert abs(right(d) - a / b / math.log(2)) < 1e-5 and abs(right(d) - twin(d)) < 1e-5
