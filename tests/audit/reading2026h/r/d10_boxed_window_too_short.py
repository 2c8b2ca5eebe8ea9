"""A second, shorter window cuts the box off. verl-project/verl#7440, https://github.com/verl-project/verl/pull/7440, 2026.
The math-DAPO scorer looks at the last 300 characters of the solution (answers of MATH-500 have up to 159). The strict
box check then takes the last 100 of those. With a long answer the opening \\boxed{ is gone, nothing is extracted, and a
right answer is scored as wrong."""
import random

FAMILY = "data"
KIND = "grader"
INPUTS = {"row": "prompt row with the ground-truth answer (string)", "completion": "the model's solution, ends with "
          "\\boxed{...}"}
SETTINGS = {}
NOTES = ("Reward +1 if the last boxed expression of the solution is, character by character, the answer, otherwise -1. Only "
         "the last 300 characters of the solution are looked at. Answers may be up to 159 characters long.")


def make(seed):
    rng = random.Random(seed)
    answer = ""
    while len(answer) < 110:
        answer += f"({rng.randint(-99, 99)},\\frac{{{rng.randint(1, 99)}}}{{{rng.randint(2, 99)}}}),"
    answer = answer[:-1]
    text = "We solve the system step by step. " * rng.randint(1, 12)
    return {"row": {"prompt": "Find all solutions.", "answer": answer}, "completion": text + "\\boxed{" + answer + "}"}


def _last_boxed(s):
    i = s.rfind("\\boxed{")
    if i < 0:
        return None
    depth = 0
    for j in range(i + len("\\boxed"), len(s)):
        depth += {"{": 1, "}": -1}.get(s[j], 0)
        if depth == 0:
            return s[i + len("\\boxed{"):j]
    return None


def broken(row, completion):
    solution = completion[-300:]
    pred = _last_boxed(solution[-100:])
    return 1.0 if pred is not None and pred == row["answer"] else -1.0


def right(row, completion):
    solution = completion[-300:]
    pred = _last_boxed(solution)
    return 1.0 if pred is not None and pred == row["answer"] else -1.0


if __name__ == "__main__":
    c = make(0)
    print("answer has", len(c["row"]["answer"]), "characters; broken", broken(**c), "right", right(**c))
    short = ({"answer": "42"}, "so the answer is \\boxed{42}")
    print("short answer", broken(*short), right(*short), "wrong answer", right({"answer": "41"}, short[1]))
    assert broken(**c) == -1.0 and right(**c) == 1.0 == broken(*short)
