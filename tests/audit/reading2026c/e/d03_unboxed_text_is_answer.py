"""The answer extractor hands back the whole text when no box is found. PrimeIntellect-ai/verifiers#1028,
https://github.com/PrimeIntellect-ai/verifiers/pull/1028, 2026. extract_boxed_answer returned its full input if there
was no \\boxed{}, and the verifier then looks for any number in it. A completion that only mentions the number got the
full reward although the task demands the boxed format; the fix returns the empty string (strict)."""
FAMILY = "agents"
KIND = "grader"
INPUTS = {"row": "dict with question and answer (a number as a string); the question demands \\boxed{}",
          "completion": "text of the model"}
SETTINGS = {}
NOTES = ("Returns 1.0 if the answer in the last \\boxed{} of the completion equals the reference, else 0.0. A completion "
         "without a box earns 0.0.")
import re


def make(seed):
    import random
    rng = random.Random(seed)
    a = rng.randrange(12, 60)
    row = {"question": f"What is {a} + 5? Put the result in \\boxed{{}}.", "answer": str(a + 5)}
    return {"row": row, "completion": f"It should come out near {a + 5} I guess."}


def _last_boxed(text):
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, i = 1, start + len("\\boxed{")
    begin = i
    while i < len(text) and depth:
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        i += 1
    return text[begin:i - 1] if depth == 0 else None


def _verify(candidate, reference):
    numbers = re.findall(r"-?\d+(?:\.\d+)?", candidate.replace(",", ""))
    return float(bool(numbers) and float(numbers[-1]) == float(reference))


def broken(row, completion):
    boxed = _last_boxed(completion)
    return _verify(completion if boxed is None else boxed, row["answer"])


def right(row, completion):
    boxed = _last_boxed(completion)
    return _verify("" if boxed is None else boxed, row["answer"])


if __name__ == "__main__":
    data = make(0)
    boxed = {"row": data["row"], "completion": f"so \\boxed{{{data['row']['answer']}}}"}
    print("unboxed", broken(**data), right(**data), "boxed", broken(**boxed), right(**boxed))
    assert broken(**data) != right(**data) and broken(**boxed) == right(**boxed) == 1.0
