"""Bits per byte over ranks: sum of nats / (ln 2 * sum of bytes), with special tokens in neither sum.
karpathy/nanochat evaluate_bpb. The denominator is bytes of text and not tokens; a special token is 0 bytes long and its loss is thrown away, and targets of -1 are skipped. The ranks add up both sums before the division; the mean of the
ranks' own values would be wrong."""
import math
import torch

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"per_rank": "list over ranks of {losses: nats per target [n], targets: token ids or -1 [n], token_bytes: bytes of each token id, 0 for special ones [vocab]}"}
SETTINGS = {}
NOTES = "Ratio of two sums over all ranks. Ranks hold different numbers of targets; a rank may hold special tokens only. Independent of the tokenizer. `single` is the one-process twin."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    token_bytes = torch.randint(1, 9, (40,), generator=g)
    token_bytes[:5] = 0
    per_rank = []
    for n in (30, 11, 4):
        targets = torch.randint(-1, 40, (n,), generator=g)
        per_rank.append({"losses": 4 * torch.rand(n, generator=g), "targets": targets, "token_bytes": token_bytes})
    per_rank[2]["targets"] = torch.tensor([0, 1, -1, 4])
    return {"per_rank": per_rank}


def _sums(losses, targets, token_bytes):
    size = torch.where(targets >= 0, token_bytes[targets.clamp(min=0)], 0)
    return (losses * (size > 0)).double().sum(), size.sum()


def single(losses, targets, token_bytes):
    nats, size = _sums(losses, targets, token_bytes)
    return float(nats / (math.log(2) * size)) if size > 0 else float("inf")


def right(per_rank):
    nats, size = 0.0, 0
    for r in per_rank:                                      # all-reduce of both sums
        a, b = _sums(**r)
        nats, size = nats + a, size + b
    return float(nats / (math.log(2) * size)) if size > 0 else float("inf")


if __name__ == "__main__":
    d = make(0)["per_rank"]
    one = single(torch.cat([r["losses"] for r in d]), torch.cat([r["targets"] for r in d]), d[0]["token_bytes"])
    nats = size = 0.0
    for r in d:
        for l, t in zip(r["losses"].tolist(), r["targets"].tolist()):
            if t >= 0 and r["token_bytes"][t] > 0:
                nats += l; size += int(r["token_bytes"][t])
    print("ranks", right(d), "single", one, "loop", nats / size / math.log(2))
    assert abs(right(d) - one) < 1e-9 and abs(one - nats / size / math.log(2)) < 1e-6
