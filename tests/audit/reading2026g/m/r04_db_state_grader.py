"""Grader of an agent by the end state of its world (tau-bench). The calls are not compared with the reference calls: they are replayed on a fresh copy of the database and the hash of the end state is compared with that of the reference calls, so a different order, extra reads, failing calls and a call that is undone again all get full marks; a right final text over a wrong state gets 0."""
FAMILY = "agents"
KIND = "grader"
INPUTS = {"row": "dict: db (name -> cents), gold_calls (list of call dicts), outputs (strings that the final text must contain)",
          "completion": "text with zero or more <tool_call>{json}</tool_call> and a final answer outside of them"}
SETTINGS = {}
NOTES = "0 or 1. The row's database is deep-copied, never changed. Invalid JSON or a refused call is a no-op, as it was in the environment. Money is in integer cents. Commas are dropped before outputs are searched in the answer text ('1,200' equals '1200'), and the tool-call text does not count as answer."
import copy
import hashlib
import json
import random
import re

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.S)


def apply(db, call):
    try:
        name, a = call["name"], call["args"]
        if name == "transfer":
            src, dst, c = a["src"], a["dst"], a["cents"]
            if type(c) is int and c > 0 and src != dst and src in db and dst in db and db[src] >= c:
                db[src] -= c
                db[dst] += c
        elif name == "close" and db.get(a["who"]) == 0:
            del db[a["who"]]
    except (KeyError, TypeError):
        pass                      # the environment answered with an error text


def digest(db):
    return hashlib.sha256(json.dumps(db, sort_keys=True).encode()).hexdigest()


def make(seed):
    r = random.Random(seed)
    db = {"ann": r.randint(2000, 5000), "bob": r.randint(2000, 5000), "cy": 0}
    gold = [{"name": "transfer", "args": {"src": "ann", "dst": "bob", "cents": 500}},
            {"name": "close", "args": {"who": "cy"}}]
    row = {"db": db, "gold_calls": gold, "outputs": [str(db["ann"] - 500)]}
    t = lambda **k: "<tool_call>" + json.dumps(k) + "</tool_call>"
    comp = (t(name="close", args={"who": "cy"}) + t(name="read", args={"who": "ann"})
            + t(name="transfer", args={"src": "ann", "dst": "bob", "cents": 300})
            + t(name="transfer", args={"src": "ann", "dst": "bob", "cents": 10**9})
            + t(name="transfer", args={"src": "ann", "dst": "bob", "cents": 200}) + f" Ann has {db['ann'] - 500:,} cents now.")
    return {"row": row, "completion": comp}


def right(row, completion):
    mine, gold = copy.deepcopy(row["db"]), copy.deepcopy(row["db"])
    for c in row["gold_calls"]:
        apply(gold, c)
    for text in CALL.findall(completion):
        try:
            apply(mine, json.loads(text))
        except json.JSONDecodeError:
            continue
    answer = CALL.sub(" ", completion).replace(",", "")
    said = all(re.search(rf"(?<!\d){re.escape(o)}(?!\d)", answer) for o in row["outputs"])
    return float(digest(mine) == digest(gold) and said)


if __name__ == "__main__":
    b = make(0)
    row, comp = b["row"], b["completion"]
    before = copy.deepcopy(row)
    assert right(row, comp) == 1.0 and row == before
    ref = "".join("<tool_call>" + json.dumps(c) + "</tool_call>" for c in row["gold_calls"])
    ans = row["outputs"][0]
    got = {"reference": right(row, ref + ans), "no calls": right(row, "Ann has " + ans), "no answer": right(row, ref),
           "twice": right(row, ref + ref + ans), "broken json first": right(row, "<tool_call>{</tool_call>" + ref + ans),
           "longer number": right(row, ref + "9" + ans), "empty": right(row, "")}
    print(got)
    assert got == {"reference": 1, "no calls": 0, "no answer": 0, "twice": 0, "broken json first": 1, "longer number": 0, "empty": 0}
