"""Right: pass@k from more than k samples by the unbiased formula 1 - C(n-c, k) / C(n, k). The samples of a problem lie on several ranks, so ranks send the counts (n, c) per problem; neither a rank's own pass@k nor any mean over ranks is formed. Problems count equally although they have different numbers of samples."""
import itertools
import math
import random

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "per rank a list of (problem, solved 0 or 1), one entry per sample; the samples of a problem may lie on several ranks"}
SETTINGS = {"k": "samples allowed, 3; every problem has at least k samples in total"}
NOTES = "Mean over problems of the chance that at least one of k samples drawn without replacement is solved. Equal weight per problem."

def make(seed):
    r = random.Random(seed)
    samples = [(p, int(r.random() < 0.15 * p)) for p in range(5) for _ in range(r.randint(4, 8))]
    r.shuffle(samples)
    return {"ranks": [samples[i::3] for i in range(3)]}

def right(ranks, k=3):
    n, c = {}, {}
    for rank in ranks:  # all-reduce of the counts
        for problem, solved in rank:
            n[problem] = n.get(problem, 0) + 1
            c[problem] = c.get(problem, 0) + solved
    return sum(1 - math.comb(n[p] - c[p], k) / math.comb(n[p], k) for p in n) / len(n)

def twin(ranks, k=3):
    """Single process: every choice of k samples."""
    by = {}
    for problem, solved in (s for rank in ranks for s in rank):
        by.setdefault(problem, []).append(solved)
    rates = []
    for results in by.values():
        draws = list(itertools.combinations(results, k))
        rates.append(sum(any(d) for d in draws) / len(draws))
    return sum(rates) / len(rates)

if __name__ == "__main__":
    made = make(0)
    print("right", right(**made), "single process", twin(**made))
    assert abs(right(**made) - twin(**made)) < 1e-12 and 0 < right(**made) < 1
