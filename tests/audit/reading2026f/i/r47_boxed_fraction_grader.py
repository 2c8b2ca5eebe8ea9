"""Maths grader (Minerva/MATH convention). Takes the LAST \\boxed{...} with balanced braces AFTER the reasoning, compares exact fractions rather than strings or floats, and treats a truncated answer (reasoning
never closed) as 0 even if a boxed answer stands inside it."""
FAMILY = "grader"
KIND = "grader"
INPUTS = {"row": "{'answer': text of a number or fraction}", "completion": "text of the model, with optional <think> ... </think>"}
SETTINGS = {}
NOTES = "Returns 1.0 or 0.0. 0.5, 1/2, \\frac{1}{2}, \\dfrac12, 50\\% and 2/4 are equal by design; thousands commas are dropped. Several boxes: the last counts, as in the MATH evaluation. Never evaluates code."
import re
from fractions import Fraction


def boxed(text):
    at = text.rfind("\\boxed{")
    if at < 0:
        return None
    depth, start = 0, at + 7
    for i in range(start - 1, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start:i]
    return None


def number(text):
    t = re.sub(r"\\left|\\right|\\,|\\!|\$|\s|,(?=\d{3})", "", text).replace("\\%", "%")
    t = re.sub(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}", r"\1/\2", t)
    t = re.sub(r"\\[dt]?frac(\d)(\d)", r"\1/\2", t)
    percent = t.endswith("%")
    try:
        value = Fraction(t.rstrip("%"))
    except (ValueError, ZeroDivisionError):
        return None
    return value / 100 if percent else value


def make(seed):
    cases = [("1/2", "<think>x</think> so \\boxed{\\frac{1}{2}}"), ("1/2", "<think>\\boxed{1/2} hmm"), ("12000", "\\boxed{3} no, \\boxed{12,000}"), ("0.5", "\\boxed{50\\%}"), ("-3/4", "\\boxed{-\\dfrac34}"), ("7", "seven")]
    a, c = cases[seed % len(cases)]
    return {"row": {"answer": a}, "completion": c}


def right(row, completion):
    if "<think>" in completion and "</think>" not in completion:
        return 0.0
    got = boxed(completion.rsplit("</think>", 1)[-1])
    a, b = number(row["answer"]), number(got) if got is not None else None
    return float(a is not None and a == b)


if __name__ == "__main__":
    got = [right(**make(s)) for s in range(6)]
    assert got == [1.0, 0.0, 1.0, 1.0, 1.0, 0.0], got
    assert right({"answer": "1/3"}, "\\boxed{0.3333}") == 0.0 and right({"answer": "1"}, "\\boxed{1/0}") == 0.0 and right({"answer": "2"}, "\\boxed{\\text{two}") == 0.0
    print("ok", got)
