"""Dynamic sampling (DAPO). Groups whose rewards are all equal are dropped as a whole since their advantage is zero, then the batch is cut to a fixed number of prompts: most
rows may vanish, including perfectly good answers, and both right and wrong completions of the rest are kept."""
FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of dicts with prompt (int), completion (str), reward (float), accuracy (0 or 1); rows of a prompt need not be adjacent"}
SETTINGS = {"prompts": "number of prompts of the batch, 3"}
NOTES = ("Filter by accuracy and not by reward: reward holds a length term that would make every group differ. Prompts are kept in order of first appearance, rows in the original order. "
         "May return fewer prompts than wanted, or an empty list; the caller then samples again.")
import random


def make(seed):
    r = random.Random(seed)
    rows = []
    for p in range(8):
        rate = r.choice([0.0, 0.5, 1.0])
        for _ in range(4):
            acc = int(r.random() < rate)
            rows.append({"prompt": p, "completion": "c%d" % r.randint(0, 999), "accuracy": acc, "reward": acc - 0.1 * r.random()})
    r.shuffle(rows)
    return {"rows": rows}


def right(rows, prompts=3):
    seen = {}
    for row in rows:
        seen.setdefault(row["prompt"], set()).add(row["accuracy"])
    useful = [p for p, values in seen.items() if len(values) > 1][:prompts]
    keep = set(useful)
    return [row for row in rows if row["prompt"] in keep]


if __name__ == "__main__":
    for seed in range(30):
        rows = make(seed)["rows"]
        out = right(rows)
        kept = {r["prompt"] for r in out}
        assert len(kept) <= 3
        for p in kept:
            grp = [r for r in rows if r["prompt"] == p]
            assert 0 < sum(r["accuracy"] for r in grp) < len(grp) and [r for r in out if r["prompt"] == p] == grp
    print("rows in", len(rows), "rows out", len(out), "prompts", sorted(kept))
