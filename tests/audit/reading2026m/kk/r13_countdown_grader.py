"""Countdown grader (TinyZero, Pan et al. 2025; verl reward_score/countdown.py). There is no reference answer to compare with: any expression that uses the given numbers once each and reaches the target counts; a wrong expression still gets 0.1 for its form, a
missing one 0, and an earlier answer tag that is right does not count if a later one is wrong."""
import ast
import random
import re
from fractions import Fraction

FAMILY = "graders"
KIND = "grader"
INPUTS = {"prompt_row": "{'numbers': list of ints, 'target': int, 'solution': one expression that works, for people to read}", "completion": "text of the model's answer"}
SETTINGS = {"format_score": "given for an answer tag whose content does not solve the task, 0.1"}
NOTES = (
    "Reads the content of the last <answer>...</answer> in the completion; 0.0 if there is none. 1.0 if it is an arithmetic expression (integers, + - * /, brackets) that uses each of the given numbers exactly as often as it is given and no other number, and equals the target exactly (rational arithmetic; division need not come out even on the way). Anything else inside the tag, including text that is "
    "no expression, division by zero or an '= target' at the end, gets format_score. prompt_row['solution'] is not used: every valid expression is right."
)


def make(seed):
    rng = random.Random(seed)
    a, b, c, d = (rng.randint(2, 9) for _ in range(4))
    target = a * b + c - d
    nums = [a, b, c, d]
    rng.shuffle(nums)
    text = "<think> %d times %d is %d, <answer>%d</answer> no, I need all numbers </think> <answer> %d - %d + (%d * %d) </answer>" % (a, b, a * b, a * b, c, d, b, a)
    return {"prompt_row": {"numbers": nums, "target": target, "solution": "%d*%d+%d-%d" % (a, b, c, d)}, "completion": text}


def _value(node, used):
    if isinstance(node, ast.Expression):
        return _value(node.body, used)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
        x, y = _value(node.left, used), _value(node.right, used)
        return {ast.Add: lambda: x + y, ast.Sub: lambda: x - y, ast.Mult: lambda: x * y, ast.Div: lambda: x / y}[type(node.op)]()
    raise ValueError("not allowed")


def right(prompt_row, completion, format_score=0.1):
    found = re.findall(r"<answer>(.*?)</answer>", completion, re.S)
    if not found:
        return 0.0
    used = []
    try:
        value = _value(ast.parse(found[-1].strip(), mode="eval"), used)
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        return format_score
    return 1.0 if sorted(used) == sorted(prompt_row["numbers"]) and value == prompt_row["target"] else format_score


if __name__ == "__main__":
    for s in range(3):
        d = make(s)
        print("seed", s, right(**d), d["completion"])
        assert right(**d) == 1.0
    row = {"numbers": [3, 3, 8, 8], "target": 24, "solution": "8/(3-8/3)"}
    table = {"8 / (3 - 8/3)": 1.0, "3*8": 0.1, "24": 0.1, "8/(3-8/3) = 24": 0.1, "8/(3-3)+8": 0.1, "I give up": 0.1, "__import__('os')": 0.1, "(8/(3-8/3))": 1.0, "8*3+3-3*8/8": 0.1, "": 0.1}
    for text, want in table.items():
        assert right(row, "<answer>%s</answer>" % text) == want, text
    assert right(row, "8 / (3 - 8/3)") == 0.0
