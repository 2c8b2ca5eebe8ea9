"""Graded tool-call reward of ToolRL (Qian et al. 2025). The calls are compared as an unordered set with the best assignment, partial credit for names, argument names and values, stretched to [-3, 3], plus a format point; so the best is 4, a wrong answer is negative, and a well-formed wrong one beats a malformed one."""
import itertools, json, re
FAMILY = "agents"
KIND = "grader"
INPUTS = {"prompt row": "dict with 'prompt' and 'calls', a non-empty list of {name, arguments}", "completion": "text: <think>...</think> then <tool_call> with one JSON call per line </tool_call>"}
SETTINGS = {}
NOTES = "Range [-3, 4], not [0, 1]. The order of calls does not matter; extra calls lower only the name overlap. A completion that does not parse gets -3. JSON types count: 1 and \"1\" differ. Deterministic."
FORM = re.compile(r"\A<think>.*?</think>\s*<tool_call>\n(.*?)\n</tool_call>\s*\Z", re.S)
def make(seed):
    import random
    r = random.Random(seed)
    calls = [{"name": n, "arguments": {"q": r.randint(0, 9), "unit": r.choice(["C", "F"])}} for n in ("weather", "search")]
    text = "<think>look</think>\n<tool_call>\n" + "\n".join(json.dumps(c) for c in reversed(calls)) + "\n</tool_call>"
    return {"row": {"prompt": "what is the weather?", "calls": calls}, "completion": text}

def right(row, completion):
    gold = row["calls"]
    m = FORM.match(completion)
    if not m:
        return -3.0
    try:
        got = [json.loads(line) for line in m.group(1).splitlines() if line.strip()]
        got = [(c["name"], dict(c["arguments"])) for c in got]
    except (ValueError, KeyError, TypeError):
        return -3.0
    gn, pn = {c["name"] for c in gold}, {n for n, _ in got}
    names = len(gn & pn) / len(gn | pn)
    def pair(g, p):
        if p is None or g["name"] != p[0]:
            return 0.0
        a, b = g["arguments"], p[1]
        keys = len(a.keys() & b.keys()) / len(a.keys() | b.keys()) if a or b else 1.0
        return keys + sum(k in b and type(a[k]) is type(b[k]) and a[k] == b[k] for k in a)
    slots = got + [None] * max(0, len(gold) - len(got))
    best = max(sum(pair(g, p) for g, p in zip(gold, pick)) for pick in itertools.permutations(slots, len(gold)))
    top = 1 + len(gold) + sum(len(g["arguments"]) for g in gold)
    return 1.0 + 6.0 * (names + best) / top - 3.0

if __name__ == "__main__":
    d = make(0); row, text = d["row"], d["completion"]
    assert right(row, text) == 4.0                                  # reversed order, full marks
    calls = json.loads(json.dumps(row["calls"])); calls[0]["arguments"]["q"] = 77
    wrap = lambda cs: "<think>x</think>\n<tool_call>\n" + "\n".join(json.dumps(c) for c in cs) + "\n</tool_call>"
    assert abs(right(row, wrap(calls)) - (4 - 6 / 7)) < 1e-9         # one of seven points lost
    assert right(row, wrap([{"name": "zzz", "arguments": {}}])) == -2.0
    assert right(row, "the weather is fine") == -3.0
    half = right(row, wrap(row["calls"][:1])); assert abs(half - (1 + 6 * (.5 + 3) / 7 - 3)) < 1e-9
    print(4.0, right(row, wrap(calls)), half, -2.0, -3.0)
