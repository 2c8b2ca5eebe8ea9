"""GSM8K answer lost behind a window of 300 characters. verl-project/verl#7274, https://github.com/verl-project/verl/pull/7274, 2026.
extract_solution cuts the response to its last 300 characters before it searches for "#### N". A rollout which keeps writing for more than 300
characters after the marker gets reward 0 for a correct answer, without any message."""
FAMILY = "graders"
KIND = "grader"
INPUTS = {"row": "{'question': str, 'ground_truth': number as a string}", "completion": "the whole decoded response, of any length"}
SETTINGS = {"score": "reward of a correct answer, 1.0", "format_score": "reward of a wrong answer in the right format, 0.0"}
NOTES = """(row, completion) -> float. Strict GSM8K grading: the answer is the number behind the last "#### " in the response, wherever in the response that
is (any amount of text may follow); thousands separators and $ are removed. Reward: score if that string equals ground_truth, format_score if there
is such a number but it differs, 0 if there is none."""
import re

_CLIP = 300


def make(seed):
    import random
    r = random.Random(seed)
    a, b = r.randint(2, 900), r.randint(2, 900)
    tail = " and the reasoning above confirms that this result is consistent." * r.randint(5, 9)
    return {"row": {"question": f"{a}+{b}?", "ground_truth": str(a + b)}, "completion": f"{a}+{b}={a + b}\n#### {a + b:,}\n{tail}"}


def _score(found, row, score, format_score):
    if not found:
        return 0.0
    ans = found[-1].replace(",", "").replace("$", "").rstrip(".")
    return score if ans == row["ground_truth"] else format_score


def broken(row, completion, score=1.0, format_score=0.0):
    text = completion
    if len(text) > _CLIP:
        text = text[-_CLIP:]
    return _score(re.findall(r"#### (\-?\$?[0-9\.\,]+)", text), row, score, format_score)


def right(row, completion, score=1.0, format_score=0.0):
    return _score(re.findall(r"#### (\-?\$?[0-9\.\,]+)", completion), row, score, format_score)


if __name__ == "__main__":
    x = make(0)
    print(len(x["completion"]), "characters; broken", broken(**x), "right", right(**x))
    assert broken(**x) == 0.0 and right(**x) == 1.0
    short = {**x, "completion": x["completion"][:40]}
    assert broken(**short) == right(**short) == 1.0
    assert right(x["row"], "#### 1\n") == 0.0 and right(x["row"], "none") == 0.0
