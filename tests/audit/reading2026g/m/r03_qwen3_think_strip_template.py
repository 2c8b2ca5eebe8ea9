"""Chat template that deletes the thoughts of earlier turns and trains only the turns after the last real user message (Qwen3 template). Tool results are rendered as a *user* block, neighbouring tool results share one block, and a tool block does not count as "the last user message", so the assistant turns of the running tool loop keep their thoughts. Older assistant turns are shown without thoughts, hence untrained: their text is not what the model produced."""
FAMILY = "agents"
KIND = "chat template"
INPUTS = {"messages": "list of dicts: role (system, user, assistant, tool), content, for assistants optionally reasoning"}
SETTINGS = {}
NOTES = "Tokens: specials 1 and 2 for <|im_start|> and <|im_end|>, else byte + 3. mask is 1 on the assistant's body and its <|im_end|>, 0 on the header, on the newline after <|im_end|>, on everything before the last real user message. A conversation may thus train on nothing of its earlier assistant turns; that is intended. The messages are not changed."
IM_START, IM_END = 1, 2


def enc(text):
    return [c + 3 for c in text.encode("utf-8")]


def dec(ids):
    out = ""
    buf = bytearray()
    for i in ids:
        if i in (IM_START, IM_END):
            out += buf.decode("utf-8", "replace") + ("<S>" if i == IM_START else "<E>")
            buf = bytearray()
        else:
            buf.append(i - 3)
    return out + buf.decode("utf-8", "replace")


def make(seed):
    import random
    r = random.Random(seed)
    a, b = r.randint(1, 99), r.randint(1, 99)
    return {"messages": [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": f"add {a} and 1"},
        {"role": "assistant", "reasoning": "old thought", "content": f"It is {a + 1}."},
        {"role": "user", "content": f"now {a}+{b} and {a}*{b}"},
        {"role": "assistant", "reasoning": "two calls", "content": f"<tool_call>add {a} {b}</tool_call><tool_call>mul {a} {b}</tool_call>"},
        {"role": "tool", "content": str(a + b)},
        {"role": "tool", "content": str(a * b)},
        {"role": "assistant", "reasoning": "done", "content": f"{a + b} and {a * b}."}]}


def right(messages):
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    ids, mask = [], []

    def add(tokens, on):
        ids.extend(tokens)
        mask.extend([on] * len(tokens))

    for i, m in enumerate(messages):
        role = m["role"]
        if role == "assistant":
            live = i > last_user
            body = m["content"]
            if live:
                body = "<think>\n" + m.get("reasoning", "").strip() + "\n</think>\n\n" + body
            add([IM_START] + enc("assistant\n"), 0)
            add(enc(body) + [IM_END], int(live))
            add(enc("\n"), 0)
        elif role == "tool":
            if i == 0 or messages[i - 1]["role"] != "tool":
                add([IM_START] + enc("user"), 0)
            add(enc("\n<tool_response>\n" + m["content"] + "\n</tool_response>"), 0)
            if i + 1 == len(messages) or messages[i + 1]["role"] != "tool":
                add([IM_END] + enc("\n"), 0)
        else:
            add([IM_START] + enc(role + "\n" + m["content"]) + [IM_END] + enc("\n"), 0)
    return ids, mask


if __name__ == "__main__":
    b = make(0)
    ids, mask = right(b["messages"])
    assert len(ids) == len(mask)
    text = dec(ids)
    trained = dec([i for i, k in zip(ids, mask) if k])
    print(text)
    print("TRAINED:", trained)
    assert "old thought" not in text and "It is" in text and "It is" not in trained
    assert trained.count("<E>") == 2 and "two calls" in trained and "tool_response" not in trained
    assert text.count("<S>user") == 3 and text.count("<tool_response>") == 2
    # the ids of the prompt for generating the last turn are a prefix of the whole
    p, _ = right(b["messages"][:-1])
    assert ids[:len(p)] == p
    print("tokens", len(ids), "trained", sum(mask))
