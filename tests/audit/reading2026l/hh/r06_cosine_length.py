"""Cosine length-scaled reward (Yeo et al. 2025 'Demystifying Long CoT', arXiv 2502.03373; open-r1 get_cosine_scaled_reward): correct answers earn less
the longer they are, wrong answers earn *more* the longer they are (their penalty shrinks), to make the model think longer when it is unsure."""
FAMILY = "graders"
KIND = "grader"
INPUTS = {"row": "{'answer': reference string}", "completion": "response; answer in the last <answer>...</answer>"}
SETTINGS = {"min_value_wrong": "reward of the shortest wrong response, -1.0", "max_value_wrong": "reward of a wrong response of max_len, -0.5",
            "min_value_correct": "reward of a correct response of max_len, 0.5", "max_value_correct": "reward of the shortest correct response, 1.0", "max_len": "in characters, 200"}
NOTES = """(row, completion) -> float. With p = min(length in characters / max_len, 1) and c = (1 + cos(pi p)) / 2 (1 for an empty response, 0 at max_len):
correct: min_value_correct + (max_value_correct - min_value_correct) * c, falling from 1.0 to 0.5 with the length; wrong (or no answer):
max_value_wrong + (min_value_wrong - max_value_wrong) * c, rising from -1.0 to -0.5 with the length: longer wrong responses are punished less, by intent."""
import math
import re


def make(seed):
    import random
    r = random.Random(seed)
    return {"row": {"answer": "17"}, "completion": "hm " * r.randint(5, 50) + f"<answer>{r.choice(['17', '18'])}</answer>"}


def right(row, completion, min_value_wrong=-1.0, max_value_wrong=-0.5, min_value_correct=0.5, max_value_correct=1.0, max_len=200):
    found = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    correct = bool(found) and found[-1].strip() == row["answer"]
    cosine = math.cos(min(len(completion) / max_len, 1.0) * math.pi)
    if correct:
        lo, hi = min_value_correct, max_value_correct
    else:
        lo, hi = max_value_wrong, min_value_wrong      # swapped: hi is the value of the shortest response
    return lo + 0.5 * (hi - lo) * (1.0 + cosine)


if __name__ == "__main__":
    curve = lambda a: [round(right({"answer": "17"}, "x" * n + f"<answer>{a}</answer>"), 4) for n in (0, 60, 120, 181, 400)]
    c, w = curve("17"), curve("18")
    print("correct", c, "\nwrong  ", w)
    assert c == sorted(c, reverse=True) and w == sorted(w) and c[-1] == 0.5 and w[-1] == -0.5 and min(c) > max(w)
    p = (60 + 19) / 200
    assert abs(c[1] - (0.5 + 0.5 * (1 + math.cos(math.pi * p)) / 2)) < 1e-4 and abs(w[1] - (-0.5 - 0.5 * (1 + math.cos(math.pi * p)) / 2)) < 1e-4
    print("make(0):", right(**make(0)))
