"""Evaluation over ranks with the wrapped-around rows of the last batch cut off. accelerate gather_for_metrics with even_batches=True, OpenPCDet, mmdetection collect_results.
The sampler fills the last step with rows from the beginning, so that all ranks take part in the collectives. After the gather (rank 0's batch, rank 1's batch, ...) of the last step only the first
n % (ranks * batch) rows are kept. Every row counts exactly once, though ranks report more rows than there are."""

import random

FAMILY = "metrics over ranks or micro-batches"
KIND = "metric over ranks"
INPUTS = {"parts": "list with one entry per rank: its list of evaluation batches, one per step, each a list of pairs (row number, 1 if the answer is right else 0); rows that only fill up the last step are repeated rows"}
SETTINGS = {"examples": "number of rows of the evaluation set, 13"}
NOTES = ("accuracy over the rows of the evaluation set, every row once. At each step the rows run through rank 0's batch, then rank 1's and so on; only the last step can have repeated rows, at its end. All ranks have equal numbers of steps "
         "and equal batches; the order of ranks matters.")


def make(seed):
    rng = random.Random(seed)
    ranks, batch, examples = 3, 2, 13
    correct = [int(rng.random() < 0.6) for _ in range(examples)]
    correct[0] = 1
    steps = -(-examples // (ranks * batch))
    parts = [[] for _ in range(ranks)]
    for s in range(steps):
        for r in range(ranks):
            rows = [(s * ranks * batch + r * batch + k) % examples for k in range(batch)]
            parts[r].append([(row, correct[row]) for row in rows])
    return {"parts": parts}


def right(parts, examples=13):
    steps = len(parts[0])
    total = count = 0
    for s in range(steps):
        gathered = [pair for rank in parts for pair in rank[s]]
        if s == steps - 1:
            left = examples % len(gathered)
            gathered = gathered[:left] if left else gathered
        total += sum(ok for _, ok in gathered)
        count += len(gathered)
    return total / count


if __name__ == "__main__":
    case = make(0)
    rows = dict(pair for rank in case["parts"] for b in rank for pair in b)
    ref = sum(rows.values()) / 13
    naive = [ok for rank in case["parts"] for b in rank for _, ok in b]
    print("right", right(**case), "every row once", ref, "with the repeated rows", sum(naive) / len(naive))
    assert len(rows) == 13 and abs(right(**case) - ref) < 1e-12
