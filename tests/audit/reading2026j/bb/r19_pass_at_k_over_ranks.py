"""Unbiased pass@k (Chen et al. 2021, Codex) when the samples of one prompt lie on several ranks: counts (n, c) are merged per prompt id first,
then 1 - prod_{i=n-c+1..n}(1 - k/i) per prompt. It uses ALL n samples, not the first k; averaging per-rank pass@k would be wrong (and
impossible where a rank has fewer than k samples)."""
import torch

FAMILY = "metrics over ranks or micro-batches"
KIND = "metric over ranks"
INPUTS = {"ranks": "list over ranks of dicts: prompt [samples] integer prompt ids, correct [samples] 0/1"}
SETTINGS = {"k": "draws, 3"}
NOTES = ("Mean over prompts (each prompt weighs the same, whatever its number of samples). A prompt with fewer than k samples over all ranks is left out of the mean. "
         "A prompt's samples may be on any ranks in any numbers. nan if no prompt is left. Single-process twin: twin(), by enumerating all k-subsets.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    prompt = torch.tensor([0] * 6 + [1] * 4 + [2] * 7 + [3] * 2 + [4] * 3)
    order = torch.randperm(len(prompt), generator=g)
    correct = (torch.rand(len(prompt), generator=g) < 0.35).long()
    return {"ranks": [{"prompt": prompt[i], "correct": correct[i]} for i in order.split([9, 2, 11])]}


def right(ranks, k=3):
    size = 1 + max((int(r["prompt"].max()) for r in ranks if len(r["prompt"])), default=-1)
    n, c = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long)
    for r in ranks:                                              # all-reduce SUM of two count tables
        n.index_add_(0, r["prompt"], torch.ones_like(r["prompt"]))
        c.index_add_(0, r["prompt"], r["correct"])
    values = []
    for ni, ci in zip(n.tolist(), c.tolist()):
        if ni < k:
            continue
        if ni - ci < k:
            values.append(1.0)
            continue
        miss = 1.0
        for i in range(ni - ci + 1, ni + 1):
            miss *= 1.0 - k / i
        values.append(1.0 - miss)
    return sum(values) / len(values) if values else float("nan")


def twin(ranks, k=3):
    from itertools import combinations
    by = {}
    for r in ranks:
        for p, ok in zip(r["prompt"].tolist(), r["correct"].tolist()):
            by.setdefault(p, []).append(ok)
    per = []
    for v in by.values():
        if len(v) >= k:
            draws = list(combinations(v, k))
            per.append(sum(any(s) for s in draws) / len(draws))
    return sum(per) / len(per) if per else float("nan")


if __name__ == "__main__":
    for seed in range(4):
        d = make(seed)
        for k in (1, 2, 3, 5):
            a, b = right(d["ranks"], k), twin(d["ranks"], k)
            assert abs(a - b) < 1e-12
        whole = [{q: torch.cat([r[q] for r in d["ranks"]]) for q in ("prompt", "correct")}]
        assert abs(right(whole) - right(d["ranks"])) < 1e-12
        print("pass@3", right(d["ranks"]), "subsets", twin(d["ranks"]))
