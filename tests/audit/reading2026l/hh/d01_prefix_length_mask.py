"""Assistant mask from lengths of separately rendered prefixes, with a template that rewrites history.
NVIDIA-NeMo/Automodel#3024, https://github.com/NVIDIA-NeMo/Automodel/pull/3024, 2026.
The answer-only mask took start = len(render(messages[:i])) and end = len(render(messages[:i+1])). Templates such as Qwen3's
drop the reasoning of an assistant turn once a later user message exists, so the stand-alone prefix is longer than the same turn in
the full rendering, and the mask runs on into the following user turn. (The PR rejects such templates; here the fix takes the spans
from the full rendering.)"""
FAMILY = "data stages, collators and chat templates"
KIND = "chat template"
INPUTS = {"messages": "list of {'role': 'user'|'assistant', 'content': str, 'reasoning': str (assistant only)}, alternating, ends with assistant"}
SETTINGS = {}
NOTES = """(messages) -> ids, mask. The conversation is rendered in a Qwen3-like way: every turn is
<|im_start|> role \\n [<think> reasoning </think>] content <|im_end|> \\n ; the reasoning is rendered only for assistant turns that come
after the last user message of the whole conversation, earlier assistant turns are rendered without it. ids is the one rendering of the
whole conversation. mask is 1 exactly on the tokens which the assistant writes in that rendering: reasoning (where rendered), content and the
closing <|im_end|> of every assistant turn; it is 0 on the headers (<|im_start|>, role, newline), on the newline behind <|im_end|> and on
every user token. mask[t] belongs to ids[t] (no shift). Tokens: one per character plus five special tokens."""
START, END, THINK, UNTHINK = 0, 1, 2, 3
BASE = 5


def _chars(s):
    return [BASE + ord(c) for c in s]


def _turn(messages, i):
    """header tokens and body tokens of turn i, as rendered inside `messages`"""
    m = messages[i]
    last_user = max((j for j, x in enumerate(messages) if x["role"] == "user"), default=-1)
    head = [START] + _chars(m["role"] + "\n")
    body = _chars(m["content"]) + [END]
    if m["role"] == "assistant" and i > last_user and m.get("reasoning"):
        body = [THINK] + _chars(m["reasoning"]) + [UNTHINK] + body
    return head, body, _chars("\n")


def render(messages, add_generation_prompt=False):
    ids = []
    for i in range(len(messages)):
        h, b, t = _turn(messages, i)
        ids += h + b + t
    if add_generation_prompt:
        ids += [START] + _chars("assistant\n")
    return ids


def make(seed):
    import random
    r = random.Random(seed)
    w = lambda n: "".join(r.choice("abcdefgh ") for _ in range(n))
    ms = []
    for _ in range(3):
        ms.append({"role": "user", "content": w(r.randint(12, 20))})
        ms.append({"role": "assistant", "content": w(r.randint(4, 9)), "reasoning": w(r.randint(5, 10))})
    return {"messages": ms}


def broken(messages):
    ids = render(messages)
    mask = [0] * len(ids)
    for i, m in enumerate(messages):
        if m["role"] != "assistant":
            continue
        start = len(render(messages[:i], add_generation_prompt=True))
        end = len(render(messages[:i + 1])) - 1          # without the trailing newline
        for t in range(start, min(end, len(ids))):
            mask[t] = 1
    return ids, mask


def right(messages):
    ids, mask = [], []
    for i, m in enumerate(messages):
        head, body, tail = _turn(messages, i)
        ids += head + body + tail
        mask += [0] * len(head) + [int(m["role"] == "assistant")] * len(body) + [0] * len(tail)
    return ids, mask


if __name__ == "__main__":
    x = make(0)
    (a, ma), (b, mb) = broken(**x), right(**x)
    assert a == b == render(x["messages"]) and ma != mb
    show = lambda ids, m: "".join(chr(i - BASE) if i >= BASE else "#" for i, k in zip(ids, m) if k)
    print("trained broken:", sum(ma), repr(show(a, ma)))
    print("trained right :", sum(mb), repr(show(b, mb)))
