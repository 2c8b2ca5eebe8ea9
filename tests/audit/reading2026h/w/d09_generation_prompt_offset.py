"""Prompt offset taken with a generation prompt that the full text lacks. ml-explore/mlx-lm#1355, https://github.com/ml-explore/mlx-lm/pull/1355, 2026.
With mask_prompt the dataset finds where the answer starts by rendering messages[:-1] with add_generation_prompt=True and taking its length.
Templates such as Gemma 4's append an empty thought channel to the generation prompt, which the rendering of the whole conversation does not hold, so the offset lies too far right:
the first tokens of each answer are not trained, and a short answer is not trained at all."""
import random

FAMILY = "data stages"
KIND = "chat template"
INPUTS = {"messages": "list of {role, content}; the last one is the assistant's answer; content is a string of words"}
SETTINGS = {"mask_prompt": "True"}
NOTES = "Returns token ids of the whole conversation and a mask, 1 where the token is trained: the whole last assistant turn (its role header may be trained, its content and end mark must be); everything before it is 0."

BOT, EOT, NL, CHANNEL, END_CHANNEL, THOUGHT = 1, 2, 3, 4, 5, 6
ROLES = {"user": 7, "assistant": 8, "system": 9}


def _words(text):
    return [10 + sum(map(ord, word)) % 40 for word in text.split()]


def apply_chat_template(messages, add_generation_prompt=False):
    ids = []
    for m in messages:
        ids += [BOT, ROLES[m["role"]], NL] + _words(m["content"]) + [EOT, NL]
    if add_generation_prompt:
        ids += [BOT, ROLES["assistant"], NL, CHANNEL, THOUGHT, NL, END_CHANNEL]
    return ids


def make(seed):
    rng = random.Random(seed)
    say = lambda n: " ".join(rng.choice(["red", "green", "sum", "of", "two", "seven", "why"]) for _ in range(n))
    return {"messages": [{"role": "user", "content": say(5)}, {"role": "assistant", "content": say(4)},
                         {"role": "user", "content": say(6)}, {"role": "assistant", "content": say(rng.randint(6, 9))}]}


def broken(messages, mask_prompt=True):
    ids = apply_chat_template(messages)
    offset = len(apply_chat_template(messages[:-1], add_generation_prompt=True)) if mask_prompt else 0
    return ids, [int(i >= offset) for i in range(len(ids))]


def right(messages, mask_prompt=True):
    ids = apply_chat_template(messages)
    offset = len(apply_chat_template(messages[:-1])) if mask_prompt else 0
    return ids, [int(i >= offset) for i in range(len(ids))]


if __name__ == "__main__":
    d = make(0)
    answer = _words(d["messages"][-1]["content"]) + [EOT]
    for f in (broken, right):
        ids, mask = f(**d)
        trained = [t for t, m in zip(ids, mask) if m]
        print(f.__name__, "trained", len(trained), "answer", len(answer), trained)
    trained = [t for t, m in zip(*right(**d)) if m]
    assert trained[3:-1] == answer and sum(broken(**d)[1]) < len(answer)
