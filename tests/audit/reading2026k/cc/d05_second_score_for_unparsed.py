"""Two scores for a sample whose answer cannot be extracted. NVIDIA-NeMo/RL#3635, https://github.com/NVIDIA-NeMo/RL/pull/3635, 2026.
The math verifier appended the score of a sample and then took the extracted answer from the parsed prediction. If nothing could be
parsed, the list of predictions is empty, [0] raises IndexError, and the except branch appended a second score 0.0. Every later
reward of the batch was one place out of position; nothing downstream noticed."""
FAMILY = "data"
KIND = "data stage"
INPUTS = {"rows": "list of dicts with id (unique), response (text of the model, with or without a boxed number) and answer (the number as a string)"}
SETTINGS = {}
NOTES = ("A batch of rollouts goes in, the same rows in the same order come out, with reward (1.0 if the last boxed number of the response is the answer, else 0.0; "
         "0.0 for a response without a boxed number) and extracted (that number as a string, or None). Each row is scored by itself.")
import random
import re


def make(seed):
    r = random.Random(seed)
    rows = []
    for i in range(10):
        answer = str(r.randint(1, 30))
        u = r.random()
        if u < 0.5:
            response = "so we get \\boxed{%s}" % answer
        elif u < 0.75:
            response = "so we get \\boxed{%d}" % r.randint(31, 60)
        else:
            response = "I do not know."
        rows.append({"id": i, "response": response, "answer": answer})
    return {"rows": rows}


def parse(text):
    return re.findall(r"\\boxed\{([^{}]*)\}", text)


def verify(gold, prediction):
    return bool(prediction) and prediction[-1] == gold


def broken(rows):
    results, extracted = [], []
    for row in rows:
        try:
            prediction = parse(row["response"])
            results.append(float(verify(row["answer"], prediction)))
            extracted.append(prediction[-1])
        except Exception:
            results.append(0.0)
            extracted.append(None)
    return [dict(row, reward=s, extracted=e) for row, s, e in zip(rows, results, extracted)]


def right(rows):
    results, extracted = [], []
    for row in rows:
        try:
            prediction = parse(row["response"])
            score, found = float(verify(row["answer"], prediction)), (prediction[-1] if prediction else None)
        except Exception:
            score, found = 0.0, None
        results.append(score)
        extracted.append(found)
    return [dict(row, reward=s, extracted=e) for row, s, e in zip(rows, results, extracted)]


if __name__ == "__main__":
    x = make(0)
    a, b = broken(**x), right(**x)
    for p, q in zip(a, b):
        print(q["response"], "|", q["answer"], "| broken", p["reward"], "right", q["reward"])
    assert [p["reward"] for p in a] != [q["reward"] for q in b]
