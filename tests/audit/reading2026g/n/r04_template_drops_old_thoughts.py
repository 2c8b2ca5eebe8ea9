"""Chat template that deletes the reasoning of earlier rounds (Qwen3). Thoughts before the last real user message vanish, tool messages are written inside a user turn and neighbouring ones share it, and a tool message does not count as the last user message. The old assistant turns are in the context but not trained, as their ids are not what was sampled."""
FAMILY = "agents"
KIND = "chat template"
INPUTS = {"messages": "list of dicts: role (system, user, assistant, tool), content, and for the assistant optionally reasoning"}
SETTINGS = {}
NOTES = "ids are UTF-8 bytes plus 256 = <|im_start|> and 257 = <|im_end|>. Trained: content and <|im_end|> of assistant turns after the last user message, including <think>; not the header and not the newline after <|im_end|>. The rendering of a conversation is on purpose not a prefix of the rendering of its continuation by a user message; it is a prefix of its continuation by tool messages and assistant turns."
START, END = 256, 257
def make(seed):
    import random
    r = random.Random(seed); w = lambda: "".join(r.choice("abcdef ") for _ in range(r.randint(3, 8)))
    return {"messages": [
        {"role": "system", "content": w()}, {"role": "user", "content": w()},
        {"role": "assistant", "reasoning": w(), "content": w()}, {"role": "tool", "content": w()},
        {"role": "assistant", "reasoning": w(), "content": w()}, {"role": "user", "content": w()},
        {"role": "assistant", "reasoning": w(), "content": w()}, {"role": "tool", "content": w()}, {"role": "tool", "content": w()},
        {"role": "assistant", "reasoning": w(), "content": w()}]}

def right(messages):
    ids, mask = [], []
    def put(text, trained=0):
        b = list(text.encode()); ids.extend(b); mask.extend([trained] * len(b))
    def special(i, trained=0):
        ids.append(i); mask.append(trained)
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    for i, m in enumerate(messages):
        if m["role"] == "tool":
            if i == 0 or messages[i - 1]["role"] != "tool":
                special(START); put("user")
            put("\n<tool_response>\n" + m["content"] + "\n</tool_response>")
            if i + 1 == len(messages) or messages[i + 1]["role"] != "tool":
                special(END); put("\n")
            continue
        live = int(m["role"] == "assistant" and i > last_user)
        special(START); put(m["role"] + "\n")
        if live and m.get("reasoning"):
            put("<think>\n" + m["reasoning"] + "\n</think>\n\n", 1)
        put(m["content"], live); special(END, live); put("\n")
    return ids, mask

def show(ids):
    return "".join({START: "<|im_start|>", END: "<|im_end|>"}.get(i, chr(i)) for i in ids)

if __name__ == "__main__":
    ms = make(0)["messages"]; ids, mask = right(ms)
    assert len(ids) == len(mask) and show(ids).count("<think>") == 2
    trained = show([i for i, m in zip(ids, mask) if m])
    want = "".join("<think>\n%s\n</think>\n\n%s<|im_end|>" % (m["reasoning"], m["content"]) for m in ms[6:] if m["role"] == "assistant")
    assert trained == want
    assert right(ms[:7])[0] == ids[:len(right(ms[:7])[0])]            # same round: prefix holds
    assert right(ms[:5])[0] != ids[:len(right(ms[:5])[0])]            # new user message: thoughts dropped
    assert show(ids).count("<tool_response>") == 3 and show(ids).count("<|im_start|>user") == 4
    print(show(ids)); print("trained", sum(mask), "of", len(ids))
