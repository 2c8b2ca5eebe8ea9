"""Silent fallback to an all-ones loss mask. NVIDIA-NeMo/Megatron-Bridge#3359, https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/3359, 2026.
The chat preprocessing asked the tokenizer for the assistant mask only if the template holds a {% generation %} block; for every other
template, that is for most released tokenizers, it took loss_mask = [1] * len(input_ids) without a word. SFT then trained on the
system prompt, the user turns and the tool results; the loss curve looks plausible."""
FAMILY = "data"
KIND = "chat template"
INPUTS = {"messages": "list of dicts with role (system, user, assistant) and content (words separated by one space), several turns, the last one from the assistant"}
SETTINGS = {}
NOTES = ("Returns (ids, mask), lists of the same length. The template of the tokenizer renders every message as [role] content [end], with a beginning-of-text token in front of the first one. It has no generation block. "
         "mask is 1 on the content of the assistant messages and on the [end] that closes them, 0 everywhere else (beginning token, role tokens, system and user messages).")
import random
import re

TEMPLATE = "{{ bos }}{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
GENERATION = re.compile(r"\{%-?\s+generation\s+-?%\}")
BOS, END = 1, 2
ROLES = {"system": 4, "user": 5, "assistant": 6}
WORDS = "what is the sum of two and three it is five thanks please more".split()


def render(messages, generation_prompt=False):
    ids = [BOS]
    for m in messages:
        ids += [ROLES[m["role"]]] + [10 + WORDS.index(w) for w in m["content"].split()] + [END]
    if generation_prompt:
        ids.append(ROLES["assistant"])
    return ids


def make(seed):
    r = random.Random(seed)
    def say():
        return " ".join(r.choice(WORDS) for _ in range(r.randint(1, 6)))
    messages = [{"role": "system", "content": say()}]
    for _ in range(r.randint(1, 3)):
        messages += [{"role": "user", "content": say()}, {"role": "assistant", "content": say()}]
    return {"messages": messages}


def broken(messages):
    ids = render(messages)
    if GENERATION.search(TEMPLATE):
        raise NotImplementedError("the tokenizer returns the mask")
    mask = [1] * len(ids)
    return ids, mask


def right(messages):
    ids = render(messages)
    if GENERATION.search(TEMPLATE):
        raise NotImplementedError("the tokenizer returns the mask")
    mask = [0] * len(ids)
    for i, m in enumerate(messages):
        if m["role"] == "assistant":
            a = len(render(messages[:i], generation_prompt=True))
            b = len(render(messages[:i + 1]))
            mask[a:b] = [1] * (b - a)
    return ids, mask


if __name__ == "__main__":
    x = make(0)
    (i, a), (j, b) = broken(**x), right(**x)
    print(i); print(a); print(b)
    assert i == j and a != b
    assert sum(b) == sum(len(m["content"].split()) + 1 for m in x["messages"] if m["role"] == "assistant")
    print("trained tokens: broken", sum(a), "right", sum(b))
