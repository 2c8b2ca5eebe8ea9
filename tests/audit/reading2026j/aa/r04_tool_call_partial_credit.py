"""ToolRL reward (Qian et al. 2025): the grade of a set of tool calls lies between -3 and 4, not 0 and 1, and order does not count.
Multiset Jaccard of the names, key overlap and equal values are summed for the best matching of calls, scaled to [-3, 3]; a right format adds 1.
A wrong format does not make the grade of the calls zero: both parts are independent, as in the paper."""
FAMILY = "agents"
KIND = "grader"
INPUTS = {"row": "prompt row with 'calls': list of the expected calls, each {name, parameters}; at least one, at most five",
          "completion": "text: <think>..</think> <tool_call> one JSON object per line </tool_call>"}
SETTINGS = {}
NOTES = ("Range -3 .. 4, perfect = 4, unreadable = -3 (or -2 with right tags). Negative grades are normal, since the advantages subtract the group mean. "
         "Values are compared as canonical JSON, so 1 and true differ, and so do 1 and '1'. Brute force over matchings of at most five calls; more than "
         "eight predicted calls count as unreadable. Not symmetric in row and completion.")
import itertools
import json
import random
import re
from collections import Counter

FORM = re.compile(r"\s*<think>.*?</think>\s*<tool_call>\n.*?\n</tool_call>\s*", re.S)
BODY = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.S)


def _jaccard(a, b):
    a, b = Counter(a), Counter(b)
    both = sum((a & b).values())
    either = sum((a | b).values())
    return both / either if either else 1.0


def _pair(want, got):
    if want["name"] != got["name"]:
        return 0.0
    w, g = want["parameters"], got["parameters"]
    same = sum(k in g and json.dumps(g[k], sort_keys=True) == json.dumps(w[k], sort_keys=True) for k in w)
    return _jaccard(w.keys(), g.keys()) + same


def _read(completion):
    found = BODY.findall(completion)
    if len(found) != 1:
        return None
    calls = []
    for line in found[0].splitlines():
        try:
            call = json.loads(line)
        except ValueError:
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not isinstance(call.get("parameters"), dict):
            return None
        calls.append(call)
    return calls if 0 < len(calls) <= 8 else None


def right(row, completion):
    form = 1.0 if FORM.fullmatch(completion) else 0.0
    got, want = _read(completion), row["calls"]
    if got is None:
        return form - 3.0
    slots = list(got) + [None] * max(0, len(want) - len(got))
    best = max(sum(_pair(w, g) for w, g in zip(want, choice) if g is not None) for choice in itertools.permutations(slots, len(want)))
    score = _jaccard([w["name"] for w in want], [g["name"] for g in got]) + best
    top = 1 + len(want) + sum(len(w["parameters"]) for w in want)
    return form + 6.0 * score / top - 3.0


def _text(calls):
    return "<think>hm</think>\n<tool_call>\n" + "\n".join(json.dumps(c) for c in calls) + "\n</tool_call>"


def make(seed):
    r = random.Random(seed)
    call = lambda: {"name": r.choice(["find", "open", "sum"]), "parameters": {k: r.randint(0, 3) for k in r.sample("abcd", r.randint(0, 3))}}
    want = [call() for _ in range(r.randint(1, 3))]
    got = [json.loads(json.dumps(c)) for c in want if r.random() < 0.8] + [call() for _ in range(r.randint(0, 1))]
    r.shuffle(got)
    return {"row": {"calls": want}, "completion": _text(got) if got else "no call"}


if __name__ == "__main__":
    seen = []
    for seed in range(300):
        c = make(seed)
        g = right(**c)
        seen.append(g)
        assert -3 <= g <= 4
        want = c["row"]["calls"]
        for order in itertools.permutations(want):
            assert abs(right(c["row"], _text(order)) - 4) < 1e-9      # any order is perfect
        assert right(c["row"], _text(want + want[:1])) < 4            # a repeated call is not
        assert right(c["row"], "hello") == -3.0
        got = _read(c["completion"])
        if got and len(got) == len(want) and right(**c) > 4 - 1e-9:
            assert Counter(map(json.dumps, map(lambda d: {"n": d["name"], "p": sorted(d["parameters"].items())}, got))) == \
                   Counter(map(json.dumps, map(lambda d: {"n": d["name"], "p": sorted(d["parameters"].items())}, want)))
    row = {"calls": [{"name": "f", "parameters": {"a": 1, "b": 2}}]}
    # by hand: names 1, keys 1/2, values 1 -> 2.5 of 4 -> 0.75, format 1
    assert abs(right(row, _text([{"name": "f", "parameters": {"a": 1}}])) - 1.75) < 1e-9
    assert right(row, _text([{"name": "f", "parameters": {"a": True, "b": 2}}])) < 4
    print("ok", min(seen), max(seen), sum(seen) / len(seen))
