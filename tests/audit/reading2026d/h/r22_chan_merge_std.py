"""Standard deviation over ranks from (count, mean, M2) triples merged pairwise by Chan's formula: the between-rank term delta^2*na*nb/n is needed, averaging per-rank variances would be wrong. Empty ranks are legal. Population std (ddof 0)."""
FAMILY = "metric over ranks"; KIND = "metric over ranks"
INPUTS = {"ranks": "list over ranks of lists of floats, of unequal lengths, some empty"}
SETTINGS = {}
NOTES = "Uses ddof=0. Independent of how values are split over ranks. Robust to a large common offset, unlike sum of squares."
import random, statistics
def make(seed):
    r = random.Random(seed); return {"ranks": [[1e8 + r.gauss(i, 1) for _ in range(n)] for i, n in enumerate((4, 0, 7, 1))]}
def twin(values): return statistics.pstdev(values)
def right(ranks):
    n, mean, m2 = 0, 0.0, 0.0
    for v in ranks:
        if not v: continue
        nb = len(v); mb = sum(v) / nb; qb = sum((x - mb) ** 2 for x in v); d = mb - mean
        m2 += qb + d * d * n * nb / (n + nb); mean += d * nb / (n + nb); n += nb
    return (m2 / n) ** 0.5
if __name__ == "__main__":
    for s in range(5):
        d = make(s); assert abs(right(**d) - twin([x for v in d["ranks"] for x in v])) < 1e-5
    print(right(**make(0)))
