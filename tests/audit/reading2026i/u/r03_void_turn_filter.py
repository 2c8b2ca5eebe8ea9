"""Trajectories with a void turn are kept but not trained. SimpleTIR (arXiv 2509.02479): a turn that gives neither a complete code block nor a final answer is void; the whole trajectory's loss mask is set to zero, while its reward still counts in the group baseline. The stage keeps the number and order of rows, and the advantages of the kept rows do not have mean zero."""
import random

FAMILY = "agents"
KIND = "data stage"
INPUTS = {"rows": "list of trajectories, each a dict: group = prompt id, reward, turns = list of dicts (ids, by_model, has_code, has_answer)"}
SETTINGS = {}
NOTES = "Adds ids, loss_mask and advantage (reward minus the mean reward of all rows of the group, void ones included). Observation tokens have mask 0. Rows with a void model turn have an all-zero mask. Nothing is dropped, the order stays; needs whole groups."


def make(seed):
    rng = random.Random(seed)
    rows = []
    for g in range(3):
        for _ in range(4):
            turns = []
            for _t in range(rng.randint(1, 3)):
                turns.append({"ids": [rng.randint(3, 30) for _ in range(rng.randint(2, 4))], "by_model": True, "has_code": rng.random() > 0.2, "has_answer": False})
                turns.append({"ids": [rng.randint(3, 30) for _ in range(2)], "by_model": False, "has_code": False, "has_answer": False})
            turns.append({"ids": [rng.randint(3, 30), 2], "by_model": True, "has_code": False, "has_answer": rng.random() > 0.2})
            rows.append({"group": g, "reward": float(rng.random() > 0.5), "turns": turns})
    return {"rows": rows}


def right(rows):
    total = {}
    for r in rows:
        s, n = total.get(r["group"], (0.0, 0))
        total[r["group"]] = (s + r["reward"], n + 1)
    out = []
    for r in rows:
        void = any(t["by_model"] and not t["has_code"] and not t["has_answer"] for t in r["turns"])
        ids, mask = [], []
        for t in r["turns"]:
            ids += t["ids"]
            mask += [int(t["by_model"] and not void)] * len(t["ids"])
        s, n = total[r["group"]]
        out.append(dict(r, ids=ids, loss_mask=mask, advantage=r["reward"] - s / n))
    return out


if __name__ == "__main__":
    rows = make(0)["rows"]; out = right(rows)
    assert len(out) == len(rows) and all(len(o["ids"]) == len(o["loss_mask"]) for o in out)
    voids = sum(not any(o["loss_mask"]) for o in out)
    for g in range(3):
        assert abs(sum(o["advantage"] for o in out if o["group"] == g)) < 1e-9
    for o in out:
        n = sum(len(t["ids"]) for t in o["turns"] if t["by_model"])
        assert sum(o["loss_mask"]) in (0, n)
    print("rows", len(out), "void", voids); assert 0 < voids < len(out)
