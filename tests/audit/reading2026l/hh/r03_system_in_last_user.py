"""Mistral's instruct format (mistral-common, tokenizer V2/V3): the system prompt is not at the start but is put in front of the *last* user message, and
nothing separates the header of the assistant turn."""
FAMILY = "data stages, collators and chat templates"
KIND = "chat template"
INPUTS = {"messages": "optional {'role': 'system', 'content'} first, then user / assistant alternating, ends with assistant"}
SETTINGS = {}
NOTES = """(messages) -> ids, mask. Mistral V3 format for one training conversation: <s> once, then for each user message [INST] content [/INST], for each assistant
message its content and </s>. By this format the system prompt is rendered inside the last user message only ([INST] system \\n\\n content [/INST]),
wherever it was given; earlier user messages are rendered without it. There is no role header for the assistant: its text follows [/INST] directly.
mask is 1 on the content and </s> of every assistant message, 0 on everything else. mask[t] belongs to ids[t] (no shift). Tokens: one per character,
specials <s> 1, </s> 2, [INST] 3, [/INST] 4."""
BOS, EOS, INST, END_INST = 1, 2, 3, 4


def _chars(s):
    return [5 + ord(c) for c in s]


def make(seed):
    import random
    r = random.Random(seed)
    w = lambda: "".join(r.choice("abcxyz ") for _ in range(r.randint(2, 9)))
    ms = [{"role": "system", "content": "sys " + w()}]
    for _ in range(r.randint(2, 3)):
        ms += [{"role": "user", "content": w()}, {"role": "assistant", "content": w()}]
    return {"messages": ms}


def right(messages):
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    turns = messages[1:] if system is not None else messages
    last_user = max(i for i, m in enumerate(turns) if m["role"] == "user")
    ids, mask = [BOS], [0]
    for i, m in enumerate(turns):
        if m["role"] == "user":
            text = m["content"] if system is None or i != last_user else system + "\n\n" + m["content"]
            new, k = [INST] + _chars(text) + [END_INST], 0
        else:
            new, k = _chars(m["content"]) + [EOS], 1
        ids += new
        mask += [k] * len(new)
    return ids, mask


if __name__ == "__main__":
    x = make(0)
    ids, mask = right(**x)
    name = {1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]"}
    text = "".join(name.get(i) or chr(i - 5) for i in ids)
    ms = x["messages"]
    us = [m["content"] for m in ms if m["role"] == "user"]
    us[-1] = ms[0]["content"] + "\n\n" + us[-1]
    ref = "<s>" + "".join(f"[INST]{u}[/INST]{a['content']}</s>" for u, a in zip(us, [m for m in ms if m["role"] == "assistant"]))
    assert text == ref, (text, ref)
    trained = "".join(name.get(i) or chr(i - 5) for i, k in zip(ids, mask) if k)
    assert trained == "".join(m["content"] + "</s>" for m in ms if m["role"] == "assistant")
    print(repr(text), "| trained:", repr(trained))
