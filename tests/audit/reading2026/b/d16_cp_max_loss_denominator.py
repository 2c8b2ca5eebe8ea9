"""The logged maximum loss divides a shard's loss by the tokens of the whole sequence. pytorch/torchtitan#3111,
https://github.com/pytorch/torchtitan/pull/3111, 2026.
With context parallelism the sequence is cut over ranks after local_valid_tokens has been counted. Each rank's average loss is its shard's loss sum over the count before the
cut, so global_max_loss is too small by about the context-parallel degree (and can lie below the mean loss)."""
import torch

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "one dict for each rank: nll (per-token loss of this rank's shard, [tokens]), labels (shard, -100 ignored), local_valid_tokens (count taken before the cut)"}
SETTINGS = {}
NOTES = "The largest average token loss of any rank, over the tokens that this rank computed; all-reduce MAX over ranks."
IGNORE = -100


def broken(ranks):
    local = [(r["nll"] * (r["labels"] != IGNORE)).sum() / r["local_valid_tokens"] for r in ranks]
    return float(torch.stack(local).max())


def right(ranks):
    local = [(r["nll"] * (r["labels"] != IGNORE)).sum() / (r["labels"] != IGNORE).sum().clamp(min=1) for r in ranks]
    return float(torch.stack(local).max())


def twin(ranks):
    """One process, plain loops."""
    best = None
    for r in ranks:
        v = [float(x) for x, y in zip(r["nll"], r["labels"]) if int(y) != IGNORE]
        m = sum(v) / max(len(v), 1)
        best = m if best is None else max(best, m)
    return best


def make(seed):
    g = torch.Generator().manual_seed(seed)
    ranks = []
    for dp in range(2):
        T, cp = 32, 4
        nll = torch.rand(T, generator=g) * 4
        labels = torch.randint(0, 50, (T,), generator=g)
        labels[torch.rand(T, generator=g) < 0.3] = IGNORE
        n = int((labels != IGNORE).sum())
        for k in range(cp):
            s = slice(k * T // cp, (k + 1) * T // cp)
            ranks.append({"nll": nll[s], "labels": labels[s], "local_valid_tokens": n})
    return {"ranks": ranks}


if __name__ == "__main__":
    x = make(0)
    print("broken", broken(**x), "right", right(**x), "twin", twin(**x))
    assert abs(right(**x) - twin(**x)) < 1e-5 and abs(broken(**x) - twin(**x)) > 1e-3
