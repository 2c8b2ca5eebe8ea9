"""pass@k by the unbiased estimator 1 - C(n-c,k)/C(n,k) when the samples of one prompt are spread over ranks: counts (n, c) per prompt are summed over ranks first, the estimator is applied after, and prompts with n < k are left out (Chen et al. 2021)."""
FAMILY = "metric over ranks"; KIND = "metric over ranks"
INPUTS = {"ranks": "list over ranks of lists of (prompt id, correct 0/1)"}
SETTINGS = {"k": "2"}
NOTES = "Mean over prompts, not over samples. Not linear in the ranks' own values: no average of per-rank pass@k. math.comb(a,k)=0 for a<k makes the value 1."
import math, random, itertools
def make(seed):
    r = random.Random(seed); x = [(p, int(r.random() < 0.3 + 0.1 * p)) for p in range(4) for _ in range(3 + p)] + [(9, 1)]; r.shuffle(x)
    return {"ranks": [x[:5], x[5:6], x[6:]]}
def right(ranks, k=2):
    n, c = {}, {}
    for rank in ranks:
        for p, ok in rank: n[p] = n.get(p, 0) + 1; c[p] = c.get(p, 0) + ok
    v = [1 - math.comb(n[p] - c[p], k) / math.comb(n[p], k) for p in n if n[p] >= k]
    return sum(v) / len(v)
def twin(samples, k=2):
    by = {}
    for p, ok in samples: by.setdefault(p, []).append(ok)
    v = [sum(any(s) for s in itertools.combinations(o, k)) / math.comb(len(o), k) for o in by.values() if len(o) >= k]
    return sum(v) / len(v)
if __name__ == "__main__":
    for s in range(6):
        d = make(s); assert abs(right(**d) - twin([x for r in d["ranks"] for x in r])) < 1e-12
    print(right(**make(0)))
