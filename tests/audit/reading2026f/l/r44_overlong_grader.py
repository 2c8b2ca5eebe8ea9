"""Soft overlong punishment (DAPO). A correct but long answer loses up to one whole point over the last `buffer` tokens before the limit, so a right answer can score 0 and a wrong one -2; the penalty is a
sum with the accuracy and no factor, and depends on the token count of the completion alone."""
FAMILY = "graders"
KIND = "grader"
INPUTS = {"row": "dict with answer (str)", "completion": "dict with text (str) and ids (list of int, the generated tokens, end token included)"}
SETTINGS = {"limit": "most tokens, 20", "buffer": "length of the zone where the penalty grows, 8"}
NOTES = ("Result in [-2, 1]: accuracy is +1 or -1 by the last word of the text, plus a length term in [-1, 0]: 0 up to limit - buffer tokens, then linear, -1 from limit on. Never raises; empty text is wrong.")
import random


def make(seed):
    r = random.Random(seed)
    n = r.randint(1, 26)
    return {"row": {"answer": "7"}, "completion": {"text": "so it is " + r.choice(["7", "8", "7.", ""]), "ids": [r.randint(1, 40) for _ in range(n)]}}


def right(row, completion, limit=20, buffer=8):
    words = completion["text"].split()
    correct = bool(words) and words[-1].rstrip(".!") == row["answer"]
    over = len(completion["ids"]) - (limit - buffer)
    penalty = min(0.0, max(-1.0, -over / buffer))
    return (1.0 if correct else -1.0) + penalty


if __name__ == "__main__":
    for n in range(1, 30):
        got = right({"answer": "7"}, {"text": "it is 7.", "ids": [1] * n})
        want = 1.0 if n <= 12 else (1.0 + (12 - n) / 8 if n <= 20 else 0.0)
        assert abs(got - want) < 1e-12, (n, got, want)
        assert abs(right({"answer": "7"}, {"text": "", "ids": [1] * n}) - (want - 2)) < 1e-12
    print([right(**make(s)) for s in range(8)])
