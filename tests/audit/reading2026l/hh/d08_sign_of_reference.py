"""The sign of the reference answer is lost. google-deepmind/proeval#19, https://github.com/google-deepmind/proeval/pull/19, 2026.
The regexes which take the reference answer out of a GSM8K solution had no optional sign. For "#### -3" the marker pattern does not match and
the plain-number fallback takes another number of the solution (or the number without its minus), so a correct signed answer is graded wrong."""
FAMILY = "graders"
KIND = "grader"
INPUTS = {"row": "{'question': str, 'answer': GSM8K solution, reasoning and then '#### N' with N an optionally signed number with optional commas and decimals}",
          "completion": "the model's response; its last number is its answer"}
SETTINGS = {}
NOTES = """(row, completion) -> 1.0 or 0.0. The reference is the number behind '####' in row['answer'] with its sign; if there is no such marker, the first signed
number of the solution. The prediction is the last signed number in the completion. Commas are ignored on both sides. Reward 1.0 if the two are
equal as numbers (3 and 3.0 are equal, 3 and -3 are not), else 0.0 (also if there is no number)."""
import re

_PRED = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


def make(seed):
    import random
    r = random.Random(seed)
    a = r.randint(2, 9)
    d = r.randint(a + 1, a + 3000)
    return {"row": {"question": f"It is {a} degrees and gets {d} degrees colder. How many degrees?", "answer": f"It falls by {d} from {a}.\n{a} - {d} is below zero.\n#### {a - d:,}"},
            "completion": f"The temperature is {a - d:,}"}


def _num(s):
    return float(s.replace(",", ""))


def _grade(ref, completion):
    pred = _PRED.findall(completion)
    return float(bool(pred) and ref is not None and abs(_num(pred[-1]) - ref) < 1e-6)


def broken(row, completion):
    m = re.search(r"####\s*(\d[\d,]*(?:\.\d+)?)", row["answer"]) or re.search(r"(\d[\d,]*(?:\.\d+)?)", row["answer"])
    return _grade(_num(m.group(1)) if m else None, completion)


def right(row, completion):
    m = re.search(r"####\s*([-+]?\d[\d,]*(?:\.\d+)?)", row["answer"]) or re.search(r"([-+]?\d[\d,]*(?:\.\d+)?)", row["answer"])
    return _grade(_num(m.group(1)) if m else None, completion)


if __name__ == "__main__":
    x = make(0)
    print(x["row"]["answer"].split("\n")[-1], "|", x["completion"], "| broken", broken(**x), "right", right(**x))
    assert broken(**x) == 0.0 and right(**x) == 1.0
    pos = ({"answer": "2+40\n#### 1,042"}, "it is 1042.0")
    assert broken(*pos) == right(*pos) == 1.0 and right(pos[0], "it is -1042") == 0.0
