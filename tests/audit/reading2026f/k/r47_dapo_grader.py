"""DAPO grader (Yu et al. 2025). +1 / -1 instead of 1 / 0, only the last 300 characters are read, the LAST 'Answer:' counts, and a length penalty that is 0 up to a soft limit,
falls linearly over the buffer and reaches -1 at the hard limit is ADDED also to right answers."""
import re
from fractions import Fraction

FAMILY = "graders"
KIND = "grader"
INPUTS = {"row": "dict with answer (string), completion_tokens (number of tokens of the completion)", "completion": "text of the completion"}
SETTINGS = {"max_tokens": "hard limit, 100", "buffer": "soft overlong buffer, 20; divides the excess"}
NOTES = "Result in [-2, 1]. Numbers compare by value (1/2 = 0.5 = 0.50, 1,000 = 1000), other answers as strings without spaces. No answer found counts as wrong. The penalty is 0 for completions up to max_tokens - buffer and at least -1."


def make(seed):
    return {"row": {"answer": "1/2", "completion_tokens": 75 + 5 * (seed % 6)}, "completion": "I think. Answer: 3 ... no.\nAnswer: 0.50"}


def value(text):
    text = text.strip().strip("$.").replace(",", "").replace(" ", "")
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return text


def right(row, completion, max_tokens=100, buffer=20):
    found = re.findall(r"Answer\s*:\s*([^\n]+)", completion[-300:])
    correct = bool(found) and value(found[-1]) == value(row["answer"])
    excess = row["completion_tokens"] - (max_tokens - buffer)
    penalty = -min(max(excess / buffer, 0.0), 1.0)
    return (1.0 if correct else -1.0) + penalty


if __name__ == "__main__":
    for tokens, want in ((10, 1.0), (80, 1.0), (85, 0.75), (90, 0.5), (100, 0.0), (140, 0.0)):
        got = right({"answer": "1/2", "completion_tokens": tokens}, "Answer: 3\nAnswer: 0.50"); print(tokens, got); assert abs(got - want) < 1e-9
    r = {"answer": "1000", "completion_tokens": 10}
    assert right(r, "Answer: 1,000.") == 1 and right(r, "the result is 1000") == -1 and right(r, "Answer: 1000\nAnswer: 7") == -1
    assert right(r, "Answer: 1000" + " " * 400) == -1 and right({"answer": "x + 1", "completion_tokens": 100}, "Answer: 2") == -2
    assert right({"answer": "x + 1", "completion_tokens": 1}, "Answer: $x+1$") == 1
