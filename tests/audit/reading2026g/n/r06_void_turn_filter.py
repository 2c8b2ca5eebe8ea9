"""Void-turn filter of SimpleTIR (Xue et al. 2025). A trajectory with a turn that has neither a complete tool call nor a final answer is dropped whole, even if its reward is 1; the group baseline is computed before, over all trajectories, so the advantages that remain do not sum to zero."""
FAMILY = "agents"
KIND = "data stage"
INPUTS = {"rows": "trajectories: dict with task, reward, turns = list of {text, has_call, has_answer}"}
SETTINGS = {}
NOTES = "Adds 'advantage' (reward minus mean of the task over all its trajectories, before the filter). Drops rows; keeps the order; does not change the input rows. Tasks may lose all rows. Success rates must be measured before this stage."
def make(seed):
    import random
    r = random.Random(seed); rows = []
    for task in range(4):
        for k in range(5):
            turns = []
            for i in range(r.randint(1, 4)):
                turns.append({"text": "t%d" % i, "has_call": r.random() < .85, "has_answer": False})
            turns[-1].update(has_call=False, has_answer=r.random() < .85)
            rows.append({"task": task, "reward": float(r.random() < .5), "turns": turns})
    return {"rows": rows}

def right(rows):
    total, count = {}, {}
    for row in rows:
        total[row["task"]] = total.get(row["task"], 0.0) + row["reward"]
        count[row["task"]] = count.get(row["task"], 0) + 1
    out = []
    for row in rows:
        if any(not (t["has_call"] or t["has_answer"]) for t in row["turns"]):
            continue
        out.append(dict(row, advantage=row["reward"] - total[row["task"]] / count[row["task"]]))
    return out

if __name__ == "__main__":
    import copy
    rows = make(0)["rows"]; keep = copy.deepcopy(rows); out = right(rows)
    assert rows == keep and 0 < len(out) < len(rows)
    good = [r for r in rows if all(t["has_call"] or t["has_answer"] for t in r["turns"])]
    assert [o["turns"] for o in out] == [g["turns"] for g in good]
    for o in out:
        rs = [r["reward"] for r in rows if r["task"] == o["task"]]
        assert abs(o["advantage"] - (o["reward"] - sum(rs) / len(rs))) < 1e-9
    lost = [r for r in rows if r not in good and r["reward"] == 1]
    print(len(rows), "->", len(out), "dropped with reward 1:", len(lost), "sum of advantages:", sum(o["advantage"] for o in out))
