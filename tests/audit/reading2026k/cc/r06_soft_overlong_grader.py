"""Reward of DAPO (arXiv 2503.14476, verl reward manager "dapo"): correctness is +1 or -1, read only from the last 300 characters of the answer, plus a soft penalty for length that starts one
buffer before the limit and falls linearly to -1 at the limit. A correct answer that is too long can so have reward 0, a wrong one -2; the answer is taken from the tail, so the
same box further up does not count."""
FAMILY = "data"
KIND = "grader"
INPUTS = {"row": "dict with answer (the number as a string)", "completion": "dict with text (what the model wrote) and n_tokens (its length in tokens)"}
SETTINGS = {"max_tokens": "limit of the answer in tokens, 100", "buffer": "tokens before the limit in which the penalty grows, 40", "penalty": "penalty at the limit, 1.0", "tail": "characters of the end that are read, 300"}
NOTES = ("Reward = +1.0 if the last 'Answer: x' of the last tail characters is the answer (compared as stripped strings), else -1.0; plus min(0, -(n_tokens - (max_tokens - buffer)) / buffer * penalty). "
         "n_tokens is at most max_tokens. Rewards are between -2 and 1.")
import random
import re


def make(seed):
    r = random.Random(seed)
    answer = str(r.randint(1, 99))
    said = answer if r.random() < 0.6 else str(r.randint(100, 200))
    filler = "so we add and get more " * r.randint(1, 30)
    text = filler + "Answer: " + said
    if r.random() < 0.3:
        text = "Answer: " + answer + " " + "wait let me check " * 25
    return {"row": {"answer": answer}, "completion": {"text": text, "n_tokens": r.randint(30, 100)}}


def right(row, completion, max_tokens=100, buffer=40, penalty=1.0, tail=300):
    found = re.findall(r"Answer:\s*([^\n ]+)", completion["text"][-tail:])
    score = 1.0 if found and found[-1].strip() == row["answer"].strip() else -1.0
    exceed = completion["n_tokens"] - (max_tokens - buffer)
    return score + min(0.0, -exceed / buffer * penalty)


if __name__ == "__main__":
    for s in range(6):
        x = make(s)
        print(x["completion"]["text"][-30:], x["row"], x["completion"]["n_tokens"], right(**x))
    assert right({"answer": "7"}, {"text": "Answer: 7", "n_tokens": 60}) == 1.0
    assert right({"answer": "7"}, {"text": "Answer: 7", "n_tokens": 80}) == 0.5
    assert right({"answer": "7"}, {"text": "Answer: 8", "n_tokens": 100}) == -2.0
    assert right({"answer": "7"}, {"text": "Answer: 7" + "x " * 200, "n_tokens": 10}) == -1.0
