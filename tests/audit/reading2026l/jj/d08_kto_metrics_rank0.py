"""KTO reward margin describes rank 0 only. hiyouga/LlamaFactory#10830, https://github.com/hiyouga/LlamaFactory/pull/10830, 2026.
The metrics of a batch (sums and counts of rewards per class) are kept only on the main process; the later reduction over ranks in log() therefore
adds nothing from the other ranks. The logged rewards and the margin are those of the main process, and classes that only other ranks saw are missing."""
import math, torch
FAMILY = "preference losses"
KIND = "metric over ranks"
INPUTS = {"per_rank": "list over ranks; each entry is the list of batches since the last log, each a dict with rewards [n] (implicit KTO reward of each row) and desirable [n] (bool)"}
SETTINGS = {}
NOTES = ("rewards/margins of KTO for the log: mean implicit reward of all desirable rows minus mean implicit reward of all undesirable rows. Both means are over rows: all rows of all ranks and of all batches since the last log, each row with the same weight, "
         "even if ranks hold different numbers of desirable and undesirable rows. NaN if one class is missing in all ranks. `single` is the same number computed in one process from all rows.")

def make(seed):
    g = torch.Generator().manual_seed(seed)
    out = []
    for r in range(3):
        bs = []
        for n in (4, 5):
            d = torch.rand(n, generator=g) < (0.8, 0.5, 0.3)[r]
            d[0], d[1] = True, False
            bs.append({"rewards": torch.randn(n, generator=g) + d.float() * (0.5 + r), "desirable": d})
        out.append(bs)
    return {"per_rank": out}

def _sums(batch):
    d, r = batch["desirable"], batch["rewards"]
    return torch.stack([r[d].sum(), d.sum().float(), r[~d].sum(), (~d).sum().float()])

def _margin(t):
    sc, nc, sr, nr = t.tolist()
    return sc / nc - sr / nr if nc and nr else math.nan

def broken(per_rank):
    stored = [torch.zeros(4) for _ in per_rank]
    for rank, batches in enumerate(per_rank):
        for b in batches:
            if rank == 0:                       # is_main_process
                stored[rank] += _sums(b)
    return _margin(torch.stack(stored).sum(0))  # reduce in log()

def right(per_rank):
    stored = [torch.zeros(4) for _ in per_rank]
    steps = len(per_rank[0])
    for i in range(steps):
        total = torch.stack([_sums(batches[i]) for batches in per_rank]).sum(0)   # all ranks reduce each batch
        stored[0] += total                                                          # then the main process stores
    return _margin(stored[0])

def single(per_rank):
    bs = [b for rank in per_rank for b in rank]
    return _margin(_sums({k: torch.cat([b[k] for b in bs]) for k in ("rewards", "desirable")}))

if __name__ == "__main__":
    d = make(0)
    print("single", single(**d), "right", right(**d), "broken", broken(**d))
    assert abs(single(**d) - right(**d)) < 1e-5 < 1e-2 < abs(single(**d) - broken(**d))
