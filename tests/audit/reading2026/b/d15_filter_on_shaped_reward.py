"""Dynamic sampling filters prompt groups on the reward after length shaping. NVIDIA-NeMo/RL#2431,
https://github.com/NVIDIA-NeMo/RL/issues/2431, 2026.
DAPO drops groups whose answers are all right or all wrong (no signal). The filter looked at the reward after the overlong penalty, so a group where all answers are
wrong passes if their lengths differ; short wrong answers then get a positive advantage over long wrong ones."""
import random
import statistics

FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of dicts: group (prompt id), acc (1.0 right, 0.0 wrong), length (tokens of the answer)"}
SETTINGS = {"max_length": "limit of answer tokens, 100", "buffer": "tokens before the limit in which the penalty grows, 20", "penalty": "largest penalty, 1.0"}
NOTES = ("DAPO: reward = acc + overlong penalty (linear, from 0 at max_length - buffer to -penalty at max_length). Keeps the groups whose task accuracy varies; the kept "
         "rows carry the shaped reward for the advantage.")


def _shape(row, max_length, buffer, penalty):
    over = row["length"] - (max_length - buffer)
    return row["acc"] + min(0.0, -over / buffer * penalty)


def _keep(rows, value):
    groups = {}
    for r in rows:
        groups.setdefault(r["group"], []).append(value(r))
    return [r for r in rows if statistics.pstdev(groups[r["group"]]) > 0]


def broken(rows, max_length=100, buffer=20, penalty=1.0):
    rows = [{**r, "reward": _shape(r, max_length, buffer, penalty)} for r in rows]
    return _keep(rows, lambda r: r["reward"])


def right(rows, max_length=100, buffer=20, penalty=1.0):
    rows = [{**r, "reward": _shape(r, max_length, buffer, penalty)} for r in rows]
    return _keep(rows, lambda r: r["acc"])


def make(seed):
    r = random.Random(seed)
    rows = []
    for g, p in enumerate([0.0, 0.5, 1.0, 0.5, 0.0, 1.0]):
        for _ in range(4):
            rows.append({"group": g, "acc": float(r.random() < p), "length": r.randint(20, 100)})
    return {"rows": rows}


if __name__ == "__main__":
    x = make(0)
    a, b = broken(**x), right(**x)
    print("groups kept: broken", sorted({r["group"] for r in a}), "right", sorted({r["group"] for r in b}))
    assert a != b
