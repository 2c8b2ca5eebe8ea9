"""Math grader: the LAST \\boxed{} with balanced braces, compared as exact fractions; no answer scores 0 and not -1.
Earlier boxed values are drafts and must be ignored (MATH, Hendrycks; verl math_reward). An unclosed last box means a cut completion and falls back to nothing, not to an earlier box. The prompt's own text is never searched."""
FAMILY = "grader"
KIND = "grader"
INPUTS = {"row": "dict with answer: a string such as 3/4, 0.75, 1,250", "completion": "text of the completion alone"}
SETTINGS = {}
NOTES = "Returns 1.0 or 0.0. 0.75 equals \\frac{3}{4} equals 75/100, exact rational arithmetic with no tolerance. Thousands commas and a leading $ and trailing % are dropped without dividing by 100. Non-numeric answers are compared as strings without spaces."
from fractions import Fraction
import re

def make(seed):
    return {"row": {"answer": "3/4"}, "completion": "First \\boxed{7}, no: \\boxed{\\frac{3}{4}}."}

def last_boxed(text):
    at = text.rfind("\\boxed{")
    if at < 0: return None
    depth, i = 0, at + len("\\boxed")
    for j in range(i, len(text)):
        depth += (text[j] == "{") - (text[j] == "}")
        if depth == 0: return text[i + 1:j]
    return None

def canon(s):
    s = s.strip().replace(" ", "").replace("\\!", "").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").lstrip("$").rstrip("$").rstrip("%").rstrip("\\")
    s = re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", s)
    m = re.fullmatch(r"(-?)\\frac\{?(-?\d+)\}?\{?(\d+)\}?", s) if "{" in s else None
    try:
        if m: return Fraction(int(m[2]), int(m[3])) * (-1 if m[1] else 1)
        return Fraction(s)                                  # reads 3/4, 0.75, -2
    except (ValueError, ZeroDivisionError):
        return s

def right(row, completion):
    got = last_boxed(completion)
    return 0.0 if got is None else float(canon(got) == canon(row["answer"]))

if __name__ == "__main__":
    for ans, comp, want in [("3/4", "First \\boxed{7}, no: \\boxed{\\frac{3}{4}}.", 1), ("0.75", "\\boxed{75/100}", 1), ("7", "\\boxed{7} then \\boxed{8}", 0),
                            ("7", "\\boxed{7} then \\boxed{8", 0), ("1,250", "\\boxed{1250}", 1), ("12", "the answer is 12", 0), ("-1/2", "\\boxed{-\\frac{1}{2}}", 1),
                            ("x+1", "\\boxed{x + 1}", 1), ("50%", "\\boxed{50\\%}", 1), ("1/3", "\\boxed{0.333}", 0), ("4", "\\boxed{1/0}", 0), ("(1,2)", "\\boxed{(1, 2)}", 1)]:
        got = right({"answer": ans}, comp); print(ans, "|", comp, "->", got); assert got == want
