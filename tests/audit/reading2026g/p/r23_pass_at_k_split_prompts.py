"""pass@k with one prompt's samples spread over ranks. Only the counts (n, c) per prompt can be added; the unbiased estimate 1 - C(n-c,k)/C(n,k) is made after the merge, and the mean is over prompts, not over samples (Chen et al. 2021)."""
import math
import random
FAMILY = "metrics over ranks"
KIND = "metric over ranks"
INPUTS = {"ranks": "list over ranks of lists of (prompt id, solved 0/1); a prompt's samples may lie on several ranks, a rank may be empty"}
SETTINGS = {"k": "samples that one may try, 3"}
NOTES = "Every prompt needs at least k samples in all, not per rank (ValueError else); a rank may hold fewer than k. Prompts weigh the same however many samples they have. Exactly 1 for a prompt with n - c < k. Twin: single(samples)."
def make(seed):
    r = random.Random(seed)
    ranks = [[], [], [], []]
    for p in range(6):
        q = r.random()
        for _ in range(r.randrange(4, 10)):
            ranks[r.choice([0, 1, 3])].append((f"p{p}", int(r.random() < q)))
    return {"ranks": ranks}
def right(ranks, k=3):
    merged = {}
    for samples in ranks:
        local = {}
        for prompt, solved in samples:
            n, c = local.get(prompt, (0, 0))
            local[prompt] = (n + 1, c + solved)
        for prompt, (n, c) in local.items():            # gathered and added
            a, b = merged.get(prompt, (0, 0))
            merged[prompt] = (a + n, b + c)
    total = 0.0
    for n, c in merged.values():
        if n < k:
            raise ValueError("prompt with fewer than k samples")
        total += 1.0 if n - c < k else 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))
    return total / len(merged)
def single(samples, k=3):
    from itertools import combinations
    by = {}
    for prompt, solved in samples:
        by.setdefault(prompt, []).append(solved)
    each = []
    for v in by.values():
        subsets = list(combinations(v, k))
        each.append(sum(any(s) for s in subsets) / len(subsets))
    return sum(each) / len(each)
if __name__ == "__main__":
    for seed in range(20):
        ranks = make(seed)["ranks"]
        flat = [s for r in ranks for s in r]
        for k in (1, 2, 3, 4):
            assert abs(right(ranks, k) - single(flat, k)) < 1e-12
    try:
        right(ranks, 50); assert False
    except ValueError:
        pass
    print("ok", [round(right(ranks, k), 4) for k in (1, 2, 3, 4)], "brute force over subsets agrees")
