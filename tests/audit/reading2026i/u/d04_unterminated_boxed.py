"""Maths grader credits an earlier answer when the final one is cut off. marin-community/marin#9163, https://github.com/marin-community/marin/pull/9163, 2026.
The permissive parser looked for the last complete \\boxed{...}. If the output ended in an empty or unterminated \\boxed{, an earlier boxed answer was recovered and got full credit.
Truncated completions were rewarded as if they had answered."""
import random
import re

FAMILY = "graders"
KIND = "grader"
INPUTS = {"row": "prompt row with the key answer (string)", "completion": "text of the model", "cases": "further (row, completion) pairs"}
SETTINGS = {}
NOTES = "1.0 if the content of the last \\boxed{...} equals the answer after removing spaces, else 0.0. The last box counts: an empty or unterminated last box is a wrong answer. Braces nest."


def make(seed):
    rng = random.Random(seed)
    a, b = rng.randint(2, 99), rng.randint(100, 199)
    row = {"prompt": "Solve.", "answer": "\\frac{%d}{%d}" % (a, b)}
    good = "\\boxed{\\frac{%d}{%d}}" % (a, b)
    cases = [
        (row, "First guess %s. But wait, check again: \\boxed{\\frac{%d}{" % (good, b)),
        (row, "So the answer is %s." % good),
        (row, "Maybe \\boxed{7}, no: %s" % good),
        (row, "Maybe %s, no: \\boxed{7}" % good),
        (row, "Perhaps %s, or rather \\boxed{}" % good),
        (row, "No box at all, %d" % a),
    ]
    return {"row": cases[0][0], "completion": cases[0][1], "cases": cases}


def _content(text, start):
    """Content of the box that opens at start (index after the brace), or None if it never closes."""
    depth = 1
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start:i]
    return None


def _same(a, b):
    return a.replace(" ", "") == b.replace(" ", "")


def broken(row, completion):
    found = [_content(completion, m.end()) for m in re.finditer(r"\\boxed\{", completion)]
    found = [f for f in found if f]                  # complete and not empty
    return 1.0 if found and _same(found[-1], row["answer"]) else 0.0


def right(row, completion):
    at = completion.rfind("\\boxed{")
    if at < 0:
        return 0.0
    last = _content(completion, at + len("\\boxed{"))
    if not last or not last.strip():
        return 0.0
    return 1.0 if _same(last, row["answer"]) else 0.0


if __name__ == "__main__":
    m = make(0)
    print("broken", [broken(*c) for c in m["cases"]], "right", [right(*c) for c in m["cases"]])
    assert [right(*c) for c in m["cases"]] == [0, 1, 1, 0, 0, 0]
    assert broken(m["row"], m["completion"]) == 1.0 and right(m["row"], m["completion"]) == 0.0
