"""Corpus BLEU over ranks. Ten integers (clipped matches and totals for n = 1..4, two lengths) are summed over the ranks and the score is made once; the mean of the ranks' BLEU is another number, and a rank whose own BLEU is 0 does no harm (Papineni et al. 2002, torchmetrics BLEUScore)."""
import math
import random
from collections import Counter
FAMILY = "metrics over ranks"
KIND = "metric over ranks"
INPUTS = {"ranks": "list over ranks of lists of (hypothesis ids, reference ids); ranks may hold different numbers of pairs, or none"}
SETTINGS = {"order": "longest n-gram, 4"}
NOTES = "No smoothing: 0 if some order has no match in the whole corpus. Clipping is per sentence, the precisions and the brevity penalty are of the corpus. Does not equal the mean over ranks or sentences. Twin: single(pairs). Works for any number of ranks and uneven shards."
def make(seed):
    r = random.Random(seed)
    pairs = []
    for _ in range(14):
        ref = [r.randrange(12) for _ in range(r.randrange(3, 15))]
        hyp = [x if r.random() < 0.85 else r.randrange(12) for x in ref][:r.randrange(2, 16)]
        pairs.append((hyp, ref))
    return {"ranks": [pairs[:7], pairs[7:8], [], pairs[8:]]}
def _counts(pairs, order):
    v = [0] * (2 * order + 2)
    for hyp, ref in pairs:
        v[-2] += len(hyp); v[-1] += len(ref)
        for n in range(1, order + 1):
            h = Counter(tuple(hyp[i:i + n]) for i in range(len(hyp) - n + 1))
            t = Counter(tuple(ref[i:i + n]) for i in range(len(ref) - n + 1))
            v[n - 1] += sum((h & t).values())
            v[order + n - 1] += sum(h.values())
    return v
def _score(v, order):
    if min(v[:order]) == 0:
        return 0.0
    logp = sum(math.log(v[i] / v[order + i]) for i in range(order)) / order
    return math.exp(min(0.0, 1 - v[-1] / v[-2]) + logp)
def right(ranks, order=4):
    total = [sum(c) for c in zip(*(_counts(pairs, order) for pairs in ranks))]      # all-reduce, sum
    return _score(total, order)
def single(pairs, order=4):
    return _score(_counts(pairs, order), order)
if __name__ == "__main__":
    assert abs(single([([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])]) - 1) < 1e-12
    assert abs(single([([1, 2, 3, 4], [1, 2, 3, 4, 5])]) - math.exp(-0.25)) < 1e-12
    differ = 0
    for seed in range(20):
        ranks = make(seed)["ranks"]
        a, b = right(ranks), single([p for r in ranks for p in r])
        mean = sum(single(r) for r in ranks) / 4
        assert abs(a - b) < 1e-12; differ += abs(mean - a) > 1e-3
    print("ok", a, b, "mean of ranks would be", mean, "differs in", differ)
