"""A mean of means that is meant: the score is the unweighted average over tasks of the task accuracies, as benchmarks
report it. Samples of a task lie on several ranks, so ranks exchange (correct, count) per task and the division is done per
task after the exchange. A task with ten samples weighs as much as one with a thousand; tasks without samples are left out."""
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "list of one dict per rank: task -> list of 0 / 1 per sample; not each rank has each task"}
SETTINGS = {}
NOTES = ("Macro average: per task correct / count over all ranks, then the plain mean over tasks with at least one sample. Not the "
         "pooled accuracy by design. Twin: the same with all samples on one rank.")
import random


def make(seed):
    rng = random.Random(seed)
    flip = lambda n, p: [int(rng.random() < p) for _ in range(n)]
    return {"ranks": [{"math": flip(12, 0.3), "code": flip(3, 0.8)}, {"math": flip(9, 0.3), "trivia": flip(2, 0.5), "empty": []},
                      {"code": flip(1, 0.8), "trivia": flip(5, 0.5)}]}


def right(ranks):
    totals = {}
    for rank in ranks:
        for task, hits in rank.items():
            correct, count = totals.get(task, (0, 0))
            totals[task] = (correct + sum(hits), count + len(hits))
    scores = [c / n for c, n in totals.values() if n]
    return sum(scores) / len(scores)


if __name__ == "__main__":
    data = make(0)
    merged = {}
    for rank in data["ranks"]:
        for task, hits in rank.items():
            merged.setdefault(task, []).extend(hits)
    pooled = [h for v in merged.values() for h in v]
    slow = [sum(v) / len(v) for v in merged.values() if v]
    print(right(**data), right([merged]), "pooled would be", sum(pooled) / len(pooled))
    assert right(**data) == right([merged]) == sum(slow) / len(slow)
