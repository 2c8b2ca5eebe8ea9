"""Token F1 as in the SQuAD / HotpotQA evaluation scripts, used as a reward by search agents (R1-Searcher, ReSearch): articles and punctuation are deleted, word
order is ignored, 'yes' / 'no' / 'noanswer' get no partial credit, the best of several references counts."""
FAMILY = "graders"
KIND = "grader"
INPUTS = {"row": "{'golds': list of reference answers}", "completion": "response; answer in the last <answer>...</answer>"}
SETTINGS = {}
NOTES = """(row, completion) -> float in [0, 1]. Reward = maximum over the references of the token F1 between reference and answer (0 without an answer tag).
Both are normalised as in SQuAD: lower case, punctuation deleted (not replaced by a space), the words a, an, the deleted, white space collapsed.
F1 is on bags of words (counts matter, order does not). If either side is exactly yes, no or noanswer after normalisation and the two differ, the F1
for that reference is 0, even if words are shared (HotpotQA's script)."""
import re
import string
from collections import Counter


def make(seed):
    import random
    r = random.Random(seed)
    return {"row": {"golds": ["The Eiffel Tower", "Tour Eiffel, Paris"]}, "completion": "I think so. <answer>" + r.choice(["eiffel tower in Paris", "a tower", "no"]) + "</answer>"}


def _norm(s):
    s = "".join(c for c in s.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", s).split())


def right(row, completion):
    found = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    if not found:
        return 0.0
    pred, best = _norm(found[-1]), 0.0
    for gold in map(_norm, row["golds"]):
        closed = {"yes", "no", "noanswer"}
        if (pred in closed or gold in closed) and pred != gold:
            continue
        p, g = pred.split(), gold.split()
        same = sum((Counter(p) & Counter(g)).values())
        if same:
            best = max(best, 2 * same / (len(p) + len(g)))
    return best


if __name__ == "__main__":
    t = lambda golds, a: right({"golds": golds}, f"x <answer>{a}</answer>")
    for golds, a, want in [(["The Eiffel Tower"], "tower, eiffel!", 1.0), (["no"], "no way", 0.0), (["No."], "no", 1.0), (["Bell Labs", "the Bell Laboratories"], "bell", 2 / 3),
                           (["a b b"], "b b", 1.0), (["x y"], "y y", 0.5), (["x"], "z", 0.0), (["O'Hare"], "ohare", 1.0)]:
        print(golds, repr(a), t(golds, a))
        assert abs(t(golds, a) - want) < 1e-9
    assert right({"golds": ["x"]}, "x") == 0.0
    print("make(0):", right(**make(0)))
