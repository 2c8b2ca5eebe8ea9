"""Chat template with reasoning: the thoughts of assistant turns BEFORE the last user message are removed, those after it are kept, and only assistant turns after the last user message are trained, since earlier ones were rendered without what produced them. The end-of-turn token is trained, the newline after it is not (Qwen3 template; HF assistant mask)."""
import random

FAMILY = "chat templates"
KIND = "chat template"
INPUTS = {"messages": "list of dicts with role (system, user, assistant, tool), content, and maybe thinking"}
SETTINGS = {}
NOTES = "Byte-level ids offset by 10; <|im_start|> = 1, <|im_end|> = 2, <think> = 3, </think> = 4. mask is 1 where trained. Role headers are never trained. A conversation ends with an assistant turn. Tool turns are read but not trained and do not count as user messages."


def make(seed):
    rng = random.Random(seed)
    w = lambda: "".join(rng.choice("abcde ") for _ in range(rng.randint(1, 5)))
    return {"messages": [{"role": "system", "content": w()}, {"role": "user", "content": w()}, {"role": "assistant", "thinking": w(), "content": w()}, {"role": "user", "content": w()},
                         {"role": "assistant", "thinking": w(), "content": w()}, {"role": "tool", "content": w()}, {"role": "assistant", "content": w()}]}


def enc(s):
    return [b + 10 for b in s.encode()]


def right(messages):
    last_user = max(i for i, m in enumerate(messages) if m["role"] == "user")
    ids, mask = [], []

    def put(x, train):
        ids.extend(x)
        mask.extend([int(train)] * len(x))
    for i, m in enumerate(messages):
        train = m["role"] == "assistant" and i > last_user
        put([1] + enc(m["role"] + "\n"), False)
        if train and m.get("thinking"):
            put([3] + enc(m["thinking"]) + [4], True)
        put(enc(m["content"]) + [2], train)
        put(enc("\n"), False)
    return ids, mask


if __name__ == "__main__":
    special = {1: "<|im_start|>", 2: "<|im_end|>", 3: "<think>", 4: "</think>"}
    show = lambda ids: "".join(special.get(t) or chr(t - 10) for t in ids)
    for s in range(20):
        ms = make(s)["messages"]
        ids, mask = right(ms)
        assert len(ids) == len(mask)
        got = show([t for t, m in zip(ids, mask) if m])
        assert got == f"<think>{ms[4]['thinking']}</think>{ms[4]['content']}<|im_end|>{ms[6]['content']}<|im_end|>"
        want = "".join("<|im_start|>" + m["role"] + "\n" + (f"<think>{m['thinking']}</think>" if i == 4 else "") + m["content"] + "<|im_end|>\n" for i, m in enumerate(ms))
        assert show(ids) == want
    # the generation prompt of the last call is a prefix of the training text
    ids6, _ = right(ms[:6] + [{"role": "assistant", "content": ""}])
    assert ids[:len(ids6) - 2] == ids6[:-2]
    print("ok", repr(got))
