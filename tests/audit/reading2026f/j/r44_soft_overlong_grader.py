"""Soft overlong punishment: the reward falls linearly from 0 to -1 over the last `cache` tokens before the limit and is -1 for what was cut off; it is ADDED to the correctness of -1/+1, so a right but overlong answer gets 0 and a wrong one -2 (DAPO, equation 13)."""
import random

FAMILY = "graders"
KIND = "grader"
INPUTS = {"row": "dict with 'answer' (int)", "completion": "dict with 'tokens' (list) and 'value' (int or None)"}
SETTINGS = {"limit": "longest generation, 100 tokens", "cache": "width of the soft zone, 20 tokens; divides, must be positive"}
NOTES = "Range [-2, 1]. Length counts all generated tokens. Continuous at both ends of the zone."


def make(seed):
    rng = random.Random(seed)
    return {"row": {"answer": 3}, "completion": {"tokens": list(range(rng.randint(1, 100))), "value": rng.choice([3, 4, None])}}


def right(row, completion, limit=100, cache=20):
    base = 1.0 if completion["value"] == row["answer"] else -1.0
    over = len(completion["tokens"]) - (limit - cache)
    return base - min(1.0, max(0.0, over / cache))


if __name__ == "__main__":
    for n in range(1, 130):
        if n <= 80: p = 0.0
        elif n <= 100: p = (80 - n) / 20
        else: p = -1.0
        for v in (3, 4, None):
            got = right({"answer": 3}, {"tokens": [0] * n, "value": v})
            assert abs(got - ((1 if v == 3 else -1) + p)) < 1e-12
    print("ok", [right({"answer": 3}, {"tokens": [0] * n, "value": 3}) for n in (80, 81, 90, 100, 120)])
