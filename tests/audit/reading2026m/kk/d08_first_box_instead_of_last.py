r"""Grader reads the first \boxed{} instead of the last. thinking-machines-lab/tinker-cookbook#895,
https://github.com/thinking-machines-lab/tinker-cookbook/issues/895 (fix: #903), 2026. The evaluation's extract_boxed searched from the front, the training's from the
back; a completion that boxes an intermediate or discarded value before its final answer was graded on the value it had discarded."""
import random

FAMILY = "graders"
KIND = "grader"
INPUTS = {"prompt_row": "{'question': str, 'answer': str}, answer is the reference without a box", "completion": "text of the model's answer"}
SETTINGS = {}
NOTES = (
    r"Math grader. The model's answer is the content of the last \boxed{...} in the completion whose braces are balanced (nested braces belong to the content); "
    "earlier boxes are intermediate values or attempts that the model corrected, and do not count. Compared with the reference as text after spaces are removed. "
    r"Returns 1.0 if equal, else 0.0; 0.0 if there is no box."
)


def make(seed):
    rng = random.Random(seed)
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    first = a * b + 1
    gold = r"\frac{%d}{%d}" % (a * b, a + b)
    text = (
        r"We first compute the product, \boxed{%d}. Checking again, that is off by one: it is %d. "
        r"Dividing by %d gives \boxed{\frac{%d}{%d}}." % (first, a * b, a + b, a * b, a + b)
    )
    return {"prompt_row": {"question": "What is the product of %d and %d over their sum?" % (a, b), "answer": gold}, "completion": text}


def _content(text, start):
    depth, i = 1, start
    while i < len(text):
        if text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return text[start:i]
        i += 1
    return None


def _extract(text, last):
    key, pos = r"\boxed{", []
    i = text.find(key)
    while i >= 0:
        pos.append(i + len(key))
        i = text.find(key, i + 1)
    for p in (reversed(pos) if last else pos):
        got = _content(text, p)
        if got is not None:
            return got
    return None


def _same(got, gold):
    return 1.0 if got is not None and got.replace(" ", "") == gold.replace(" ", "") else 0.0


def broken(prompt_row, completion):
    return _same(_extract(completion, last=False), prompt_row["answer"])


def right(prompt_row, completion):
    return _same(_extract(completion, last=True), prompt_row["answer"])


if __name__ == "__main__":
    for s in range(3):
        d = make(s)
        print("seed", s, "broken", broken(**d), "right", right(**d), "|", d["completion"])
        assert broken(**d) == 0.0 and right(**d) == 1.0
    row = {"question": "", "answer": "7"}
    assert right(row, "no box") == 0 and right(row, r"\boxed{7}") == 1 and right(row, r"\boxed{7} then \boxed{8}") == 0
    assert right(row, r"\boxed{7} and an unfinished \boxed{8") == 1
