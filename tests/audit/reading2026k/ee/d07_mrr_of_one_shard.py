"""Reranker evaluation reports the MRR of one rank's shard. modelscope/ms-swift#10088, https://github.com/modelscope/ms-swift/pull/10088, 2026.
Megatron validation of a reranker computed MRR and NDCG from the queries of each data-parallel rank and never reduced them, so the value
that is logged, and by which the checkpoint is chosen, was that of one rank's shard. Fixed by a sum and count over the data-parallel
group that weights only valid queries."""
import random

FAMILY = "metrics over ranks or micro-batches"
KIND = "metric over ranks"
INPUTS = {"parts": "list with one entry per data-parallel rank: the list of its queries, each a pair (scores of the candidates, labels: 1 relevant, 0 not)"}
SETTINGS = {}
NOTES = ("mean reciprocal rank of the best-scored relevant candidate over the valid queries of all ranks together (a query is valid if it has a relevant "
         "candidate); ranks can have different numbers of queries, also none; 0.0 if no query is valid. Scores have no ties.")


def make(seed):
    rng = random.Random(seed)
    parts = []
    for n in (3, 5, 2, 4):
        queries = []
        for _ in range(n):
            labels = [0] * 6
            labels[rng.randrange(6)] = 1
            if rng.random() < 0.2:
                labels = [0] * 6
            queries.append(([rng.gauss(0, 1) for _ in labels], labels))
        parts.append(queries)
    return {"parts": parts}


def reciprocal_ranks(queries):
    out = []
    for scores, labels in queries:
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        ranks = [place + 1 for place, i in enumerate(order) if labels[i]]
        if ranks:
            out.append(1.0 / ranks[0])
    return out


def broken(parts):
    per_rank = []
    for queries in parts:                                    # on every rank
        rr = reciprocal_ranks(queries)
        per_rank.append(sum(rr) / len(rr) if rr else 0.0)
    return per_rank[-1]                                      # the last rank logs


def right(parts):
    total, count = 0.0, 0
    for queries in parts:
        rr = reciprocal_ranks(queries)
        total, count = total + sum(rr), count + len(rr)      # all_reduce of two scalars
    return total / count if count else 0.0


if __name__ == "__main__":
    case = make(0)
    every = reciprocal_ranks([q for queries in case["parts"] for q in queries])
    print("broken", broken(**case), "right", right(**case), "reference", sum(every) / len(every))
    assert abs(right(**case) - sum(every) / len(every)) < 1e-12 and abs(broken(**case) - right(**case)) > 1e-3
