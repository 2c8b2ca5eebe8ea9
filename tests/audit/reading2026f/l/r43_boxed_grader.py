"""Math grader by the last \\boxed{}. Braces are matched by counting, since answers nest; the LAST box counts, even if an earlier one was right; numbers are compared as exact fractions, so
0.5, 1/2, 50\\% and \\frac{1}{2} agree while 0.3333 is not 1/3. An unclosed last box scores zero."""
FAMILY = "graders"
KIND = "grader"
INPUTS = {"row": "dict with answer (str, the gold answer)", "completion": "model text"}
SETTINGS = {}
NOTES = ("1.0 or 0.0. Without a box: 0. Comparison is exact, by Fraction if both sides are numbers (commas as thousands separators, percent, a/b, \\frac, \\dfrac), else by text without spaces and outer $. "
         "Case matters for text. Never raises.")
import random
import re
from fractions import Fraction


def make(seed):
    r = random.Random(seed)
    n, k = r.randint(1, 9), r.choice([2, 4, 5])
    text = r.choice(["\\frac{%d}{%d}" % (n, k), "%d/%d" % (n, k), str(n / k), "%s\\%%" % (100 * n / k), "x^2", "\\frac{%d}{%d}" % (n + 1, k)])
    return {"row": {"answer": "%d/%d" % (n, k)}, "completion": "First \\boxed{0}, but then \\boxed{%s}." % text}


def last_box(text):
    at = text.rfind("\\boxed{")
    if at < 0:
        return None
    depth, start = 1, at + len("\\boxed{")
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start:i]
    return None


def number(text):
    t = text.replace("\\,", "").replace("\\!", "").replace("$", "").replace(" ", "")
    t = re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", t)
    percent = t.endswith("%")
    t = t.rstrip("%").rstrip("\\")
    t = re.sub(r"^(-?)\\[dt]?frac\{(-?\d+)\}\{(-?\d+)\}$", r"\1\2/\3", t)
    if not re.fullmatch(r"-?(\d+(\.\d*)?|\.\d+|-?\d+/-?\d+)", t):
        return None
    top, _, bottom = t.partition("/")
    if t.startswith("--"):
        top = top[2:]
    value = Fraction(top)
    if bottom:
        if int(bottom) == 0:
            return None
        value /= int(bottom)
    return value / 100 if percent else value


def right(row, completion):
    box = last_box(completion)
    if box is None:
        return 0.0
    a, b = number(box), number(row["answer"])
    if a is not None and b is not None:
        return float(a == b)
    clean = lambda s: s.replace(" ", "").strip("$")
    return float(clean(box) == clean(row["answer"]))


if __name__ == "__main__":
    cases = [("1/2", "\\boxed{0.5}", 1), ("1/2", "\\boxed{\\frac{1}{2}}", 1), ("0.5", "\\boxed{50\\%}", 1), ("1/3", "\\boxed{0.3333}", 0), ("-1/2", "\\boxed{-\\frac{1}{2}}", 1),
             ("4", "\\boxed{4} so \\boxed{5}", 0), ("4", "\\boxed{5} no, \\boxed{4}", 1), ("4", "\\boxed{4} and \\boxed{4", 0), ("1234567", "\\boxed{1,234,567}", 1), ("12", "the answer is 12", 0),
             ("x^{2}", "\\boxed{x^{2}}", 1), ("1/0", "\\boxed{1/0}", 1), ("(1,2)", "\\boxed{(1, 2)}", 1), ("3", "\\boxed{}", 0), ("7", "\\boxed{ $7$ }", 1), ("0.5", "\\boxed{.5}", 1)]
    for gold, text, want in cases:
        assert right({"answer": gold}, text) == want, (gold, text)
    print("16 cases right;", sum(right(**make(s)) for s in range(50)), "of 50 random ones score 1")
