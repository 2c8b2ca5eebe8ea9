"""Math grader: the LAST \\boxed{...} counts, found by matching braces; both sides become exact fractions where possible (1/2, 0.5, \\frac12, 50\\% are equal), and an answer without a box is wrong even if the number is in the text. The strictness and the last-box rule look harsh (Minerva/MATH graders; lm-evaluation-harness)."""
import re
from fractions import Fraction

FAMILY = "graders"
KIND = "grader"
INPUTS = {"row": "dict with 'answer' (string)", "completion": "text of the model"}
SETTINGS = {}
NOTES = "1.0 or 0.0. Exact arithmetic, no tolerance. An unclosed box is no box and an earlier closed one then counts. Pure, no eval, no time-out needed."


def make(seed):
    pool = [("1/2", r"so \boxed{\frac{1}{2}}"), ("-3", r"first \boxed{4}, no: \boxed{-3}."), ("0.25", r"\boxed{25\%}"), ("x+1", r"\boxed{x + 1}"), ("7", "the answer is 7")]
    a, c = pool[seed % len(pool)]
    return {"row": {"answer": a}, "completion": c}


def last_boxed(text):
    for m in reversed(list(re.finditer(r"\\boxed\s*\{", text))):
        depth, k = 1, m.end()
        while k < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[k], 0)
            k += 1
        if depth == 0:
            return text[m.end():k - 1]
    return None


def canonical(s):
    s = s.strip().strip("$").replace("\\,", "").replace("\\!", "").replace(" ", "").rstrip(".")
    s = s.replace("dfrac", "frac").replace("tfrac", "frac")
    s = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", s)
    s = re.sub(r"\\frac\{(-?\d+)\}\{(\d+)\}", r"\1/\2", s)
    s = re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", s)
    pct = s.endswith("\\%") or s.endswith("%")
    if pct:
        s = s.rstrip("%").rstrip("\\")
    try:
        v = Fraction(s)
        return v / 100 if pct else v
    except (ValueError, ZeroDivisionError):
        return s + ("%" if pct else "")


def right(row, completion):
    got = last_boxed(completion)
    return 0.0 if got is None else float(canonical(got) == canonical(row["answer"]))


if __name__ == "__main__":
    cases = [("1/2", r"\boxed{\frac12}", 1), ("1/2", r"\boxed{0.5}", 1), ("50%", r"\boxed{\dfrac{1}{2}}", 1), ("1/2", "1/2", 0), ("3", r"\boxed{3} then \boxed{4}", 0),
             ("4", r"\boxed{3} then \boxed{4}", 1), ("1234", r"\boxed{1,234}", 1), ("3", r"\boxed{3} \boxed{4", 1), ("-1/2", r"\boxed{-\frac{1}{2}}", 1), ("0.3", r"\boxed{0.30}", 1),
             ("1/3", r"\boxed{0.3333}", 0), ("1", r"\boxed{1/0}", 0), (r"\sqrt{2}", r"\boxed{ \sqrt{2} }", 1)]
    for a, c, w in cases:
        assert right({"answer": a}, c) == w, (a, c)
    print("ok", len(cases), [right(**make(s)) for s in range(5)])
