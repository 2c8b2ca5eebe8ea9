"""DAPO's dynamic sampling as a data stage: whole groups whose rewards are all equal are dropped (no advantage), then exactly `want` prompts are kept in order of arrival, and what is left over is thrown away, not kept for later. Dropping more than half of the data is right (Yu et al. 2025)."""
import random

FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of dicts with 'prompt_id', 'completion', 'reward' (task reward), 'shaped' (reward with length penalty); rows of a prompt need not be neighbours"}
SETTINGS = {"want": "prompts to keep, 3", "group": "completions of a prompt, 4"}
NOTES = "Groups are kept whole; incomplete groups are dropped. Variance is judged on the task reward, not on the shaped one. Fewer than `want` are returned if fewer exist. Output: sorted by arrival of the group's first row, rows in arrival order."


def make(seed):
    rng = random.Random(seed)
    rows = []
    for p in range(8):
        solved = rng.choice([0.0, 0.5, 1.0, 0.5])
        for c in range(4 if p != 2 else 3):
            r = float(rng.random() < solved)
            rows.append({"prompt_id": p, "completion": f"{p}.{c}", "reward": r, "shaped": r - 0.1 * rng.random()})
    rng.shuffle(rows)
    return {"rows": rows}


def right(rows, want=3, group=4):
    groups = {}
    for r in rows:
        groups.setdefault(r["prompt_id"], []).append(r)          # dicts keep arrival order
    good = [g for g in groups.values() if len(g) == group and len({r["reward"] for r in g}) > 1]
    return [r for g in good[:want] for r in g]


if __name__ == "__main__":
    sizes = []
    for seed in range(30):
        rows = make(seed)["rows"]
        out = right(rows)
        ids = [r["prompt_id"] for r in out]
        ok, seen = [], []
        for r in rows:                               # slow twin
            if r["prompt_id"] not in seen:
                seen.append(r["prompt_id"])
                g = [x for x in rows if x["prompt_id"] == r["prompt_id"]]
                if len(g) == 4 and min(x["reward"] for x in g) < max(x["reward"] for x in g):
                    ok.append(g)
        assert out == sum(ok[:3], []) and 2 not in ids
        sizes.append(len(out))
    print("ok", sizes)
