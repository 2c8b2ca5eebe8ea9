"""Unbiased pass@k where the samples of one prompt lie on different ranks. Counts (n, c) are pooled per prompt first and 1 - C(n-c, k)/C(n, k) is applied to the pooled counts; a rank alone may hold fewer than k samples of a prompt. Chen et al. 2021 (HumanEval)."""
FAMILY = "metrics over ranks"
KIND = "metric over ranks"
INPUTS = {"ranks": "list, per rank a list of (prompt id, passed: True or False), in any order; may be empty"}
SETTINGS = {"k": "k of pass@k, 3"}
NOTES = "Mean over prompts (each prompt weighs the same, whatever its number of samples). Raises if some prompt has fewer than k samples in all ranks together. With n - c < k the prompt counts 1. Not linear in the counts, so per-rank values cannot be averaged. Twin: single(all pairs, k)."
from math import comb


def right(ranks, k=3):
    pool = {}
    for r in ranks:                                                     # all_gather_object
        for prompt, ok in r:
            n, c = pool.get(prompt, (0, 0))
            pool[prompt] = (n + 1, c + bool(ok))
    if any(n < k for n, _ in pool.values()):
        raise ValueError("a prompt has fewer than k samples")
    return sum(1 - comb(n - c, k) / comb(n, k) for n, c in pool.values()) / len(pool)


def single(pairs, k=3):
    from itertools import combinations
    scores = []
    for p in sorted({q for q, _ in pairs}):
        sets = list(combinations([ok for q, ok in pairs if q == p], k))
        scores.append(sum(any(s) for s in sets) / len(sets))
    return sum(scores) / len(scores)


def make(seed):
    import random
    rng = random.Random(seed)
    pairs = [(p, rng.random() < 0.1 + 0.15 * p) for p in range(5) for _ in range(rng.randint(3, 9))]
    rng.shuffle(pairs)
    return {"ranks": [pairs[:4], [], pairs[4:15], pairs[15:]]}


if __name__ == "__main__":
    for s in range(20):
        ranks = make(s)["ranks"]
        flat = [p for r in ranks for p in r]
        for k in (1, 2, 3):
            assert abs(right(ranks, k) - single(flat, k)) < 1e-12
    try:
        right([[(0, True), (0, False)]]); raise SystemExit("no error")
    except ValueError as e:
        print("over ranks", right(ranks), "all subsets by a loop", single(flat), "|", e)
