"""Tool observations are decoded and scored as if the policy had written them.
verl-project/verl#6392, https://github.com/verl-project/verl/pull/6392, 2026 (May).
The default reward managers decode the response with attention_mask. In a tool rollout the
attention mask is 1 on tool output too; only response_mask says which tokens the policy made.
A tool result that holds the answer earned the reward although the policy never said it."""
import random
import re

FAMILY = 'agents'
KIND = 'grader'
INPUTS = {
    'row': "prompt row: {'answer': the gold answer as a string}",
    'completion': 'dict: tokens (words of the whole response), attention_mask (1 = not padding), response_mask (1 = written by the policy, 0 = tool output or padding)',
}
SETTINGS = {}
NOTES = (
    'Reward 1.0 if the last number that the policy wrote equals the gold answer, else 0.0. Tool '
    'output is context, not something the policy is credited for. '
)


def make(seed):
    g = random.Random(seed)
    answer = str(g.randint(10, 99))
    guess = str(g.randint(100, 199))
    turns = [(["I", "think", guess], 1), (["call", "calc"], 1), (["result", answer], 0)]
    if seed % 3 == 2:
        turns.append((["so", answer], 1))
    tokens, mask = [], []
    for words, own in turns:
        tokens += words
        mask += [own] * len(words)
    pad = 12 - len(tokens)
    return {
        "row": {"answer": answer},
        "completion": {"tokens": tokens + ["<pad>"] * pad, "attention_mask": [1] * len(tokens) + [0] * pad,
                       "response_mask": mask + [0] * pad},
    }


def score(text, answer):
    numbers = re.findall(r"\d+", text)
    return 1.0 if numbers and numbers[-1] == answer else 0.0


def broken(row, completion):
    keep = completion["attention_mask"]
    text = " ".join(t for t, k in zip(completion["tokens"], keep) if k)
    return score(text, row["answer"])


def right(row, completion):
    keep = [a * r for a, r in zip(completion["attention_mask"], completion["response_mask"])]
    text = " ".join(t for t, k in zip(completion["tokens"], keep) if k)
    return score(text, row["answer"])


if __name__ == "__main__":
    d = make(0)
    print("broken", broken(**d), "right", right(**d))
    assert broken(**d) == 1.0 and right(**d) == 0.0
    assert broken(**make(2)) == right(**make(2)) == 1.0
