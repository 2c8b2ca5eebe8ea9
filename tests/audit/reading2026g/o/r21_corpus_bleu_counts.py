"""Corpus BLEU over ranks from summed counts. Ten integers per rank (matches and totals for n = 1..4, two lengths) are summed and only then combined; the brevity penalty uses the total lengths, so short sentences may be made up by long ones elsewhere. Papineni et al. 2002, sacrebleu's corpus statistics."""
FAMILY = "metrics over ranks"
KIND = "metric over ranks"
INPUTS = {"ranks": "list, per rank a list of (hypothesis token list, reference token list); may be empty"}
SETTINGS = {}
NOTES = "Corpus BLEU, 0..100, up to 4-grams, one reference, clipped matches, no smoothing: 0 if some order has no match in ALL ranks; a rank with no match of its own is no trouble. Not the mean of sentence or rank scores. Twin: single(all pairs)."
import math
from collections import Counter


def stats(pairs):
    s = [0] * 10
    for h, r in pairs:
        s[8] += len(h)
        s[9] += len(r)
        for n in range(1, 5):
            a = Counter(tuple(h[i:i + n]) for i in range(len(h) - n + 1))
            b = Counter(tuple(r[i:i + n]) for i in range(len(r) - n + 1))
            s[n - 1] += sum((a & b).values())
            s[n + 3] += sum(a.values())
    return s


def score(s):
    if min(s[:8]) == 0:
        return 0.0
    logs = sum(math.log(s[i] / s[i + 4]) for i in range(4)) / 4
    return 100 * math.exp(min(0.0, 1 - s[9] / s[8]) + logs)


def right(ranks):
    return score([sum(c) for c in zip(*map(stats, ranks))])        # all_reduce(SUM) of ten integers


def single(pairs):
    return score(stats(pairs))


def make(seed):
    import random
    rng = random.Random(seed)
    def pair():
        r = [rng.randrange(12) for _ in range(rng.randint(2, 20))]
        return [t if rng.random() < 0.85 else rng.randrange(12) for t in r][:rng.randint(1, 20)], r
    return {"ranks": [[pair() for _ in range(n)] for n in (5, 0, 2, 9)]}


if __name__ == "__main__":
    for s in range(20):
        ranks = make(s)["ranks"]
        flat = [p for r in ranks for p in r]
        assert right(ranks) == single(flat) == right(ranks[::-1]) and 0 <= right(ranks) <= 100
    assert abs(single([([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])]) - 100) < 1e-9
    # by hand: hyp 1 2 3 4 9 against 1 2 3 4 5 6 -> 4/5 3/4 2/3 1/2, penalty exp(1-6/5)
    want = 100 * math.exp(-0.2) * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
    assert abs(single([([1, 2, 3, 4, 9], [1, 2, 3, 4, 5, 6])]) - want) < 1e-9
    print("over ranks", right(ranks), "one process", single(flat), "mean of ranks (wrong)", sum(map(single, (r for r in ranks if r))) / 3)
