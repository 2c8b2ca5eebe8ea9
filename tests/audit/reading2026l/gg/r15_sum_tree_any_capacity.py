"""Prioritised replay over a heap-shaped sum tree with a capacity that is not a power of two (cleanrl Rainbow). The leaves are then not in left-to-right order, so that a prefix sum does not meet the item whose cumulative priority it is
(reported as a bug in vwxyzjn/cleanrl#546, 2026), but each leaf owns an interval as long as its priority: the sampling probabilities are exactly right."""
import random

FAMILY = "replay and off-policy corrections"
KIND = "data stage"
INPUTS = {"rows": "stored transitions; each a dict: 'id', 'priority' (positive)", "draws": "numbers in (0, 1), one for each sample wanted"}
SETTINGS = {"alpha": "exponent of the priority, 0.6", "beta": "exponent of the importance weight, 0.4"}
NOTES = ("Proportional prioritised replay. P(i) = priority_i^alpha / sum. Each draw u gives one sample: the item whose interval of length P(i) holds u; the intervals cover (0, 1) without overlap, in the order in which the tree's leaves stand, "
         "which is not the order of storage unless the number of rows is a power of two; the order has no meaning. Each uniform draw thus gives item i with probability P(i), with replacement. "
         "Output: for each draw a copy of the row with 'weight' = (N * P(i))^-beta divided by the largest such weight over all stored rows (so at most 1). Stratified draws are allowed. Any number of rows.")


def make(seed):
    rng = random.Random(seed)
    n, k = 11, 24
    return {"rows": [{"id": i, "priority": rng.expovariate(1.0) + 0.05} for i in range(n)], "draws": [(j + rng.random()) / k for j in range(k)]}


def right(rows, draws, alpha=0.6, beta=0.4):
    n = len(rows)
    tree = [0.0] * (2 * n - 1)
    for i, r in enumerate(rows):
        j = i + n - 1
        tree[j] = r["priority"] ** alpha
        while j:
            j = (j - 1) // 2
            tree[j] = tree[2 * j + 1] + tree[2 * j + 2]
    top = (n * min(tree[n - 1:]) / tree[0]) ** -beta
    out = []
    for u in draws:
        x, j = u * tree[0], 0
        while j < n - 1:
            left = 2 * j + 1
            if x <= tree[left]:
                j = left
            else:
                x, j = x - tree[left], left + 1
        out.append(dict(rows[j - n + 1], weight=(n * tree[j] / tree[0]) ** -beta / top))
    return out


if __name__ == "__main__":
    m = make(0)
    K = 50000
    cnt = [0] * 11
    for r in right(m["rows"], [(k + 0.5) / K for k in range(K)]):
        cnt[r["id"]] += 1
    p = [r["priority"] ** 0.6 for r in m["rows"]]
    err = max(abs(c / K - x / sum(p)) for c, x in zip(cnt, p))
    out = right(**m)
    print("largest error of the sampling probabilities", err, "ids", [o["id"] for o in out])
    assert err < 1e-3 and max(o["weight"] for o in out) <= 1.0
    for o in out:
        assert abs(o["weight"] - ((p[o["id"]] / min(p)) ** -0.4)) < 1e-9
