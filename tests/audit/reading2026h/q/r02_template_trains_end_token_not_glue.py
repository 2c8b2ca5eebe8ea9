"""Chat template whose mask has the end-of-turn token but not the newline after it. ChatML as in Qwen: `<|im_start|>assistant\\n ... <|im_end|>\\n`; the policy writes <|im_end|>, the template writes the header and the last newline.
The trained span therefore ends one token before the turn's text ends and starts after the header. Tool results come under the user role and are not trained; the tool call inside an assistant turn is."""
FAMILY = "agents"
KIND = "chat template"
INPUTS = {"messages": "list of dicts with role (system, user, assistant, tool) and content (list of token ids)"}
SETTINGS = {}
NOTES = "Returns (ids, mask) of equal length, mask at the index of the token itself (not shifted). Trained: content of assistant turns and their <|im_end|>. Not trained: headers, the newline after <|im_end|>, all other roles. Neighbouring tool messages share one user turn (Qwen's convention), so the number of headers is smaller than the number of messages."
IM_START, IM_END, NL = 40, 41, 42
ROLE = {"system": 43, "user": 44, "assistant": 45}
TOOL_OPEN, TOOL_CLOSE = 46, 47


def make(seed):
    import random
    r = random.Random(seed)
    c = lambda n: [r.randrange(0, 40) for _ in range(n)]
    return {"messages": [{"role": "system", "content": c(3)}, {"role": "user", "content": c(4)},
                         {"role": "assistant", "content": c(5)}, {"role": "tool", "content": c(3)},
                         {"role": "tool", "content": c(2)}, {"role": "assistant", "content": c(4)}]}


def right(messages):
    ids, mask = [], []

    def put(tokens, train):
        ids.extend(tokens)
        mask.extend([int(train)] * len(tokens))
    for i, m in enumerate(messages):
        if m["role"] == "tool":
            if i == 0 or messages[i - 1]["role"] != "tool":
                put([IM_START, ROLE["user"], NL], False)
            put([TOOL_OPEN] + m["content"] + [TOOL_CLOSE], False)
            if i + 1 == len(messages) or messages[i + 1]["role"] != "tool":
                put([IM_END, NL], False)
            continue
        put([IM_START, ROLE[m["role"]], NL], False)
        own = m["role"] == "assistant"
        put(m["content"] + [IM_END], own)
        put([NL], False)
    return ids, mask


if __name__ == "__main__":
    m = make(0)["messages"]
    ids, mask = right(m)
    want = [t for x in m if x["role"] == "assistant" for t in x["content"] + [IM_END]]
    got = [t for t, k in zip(ids, mask) if k]
    print(len(ids), "tokens,", sum(mask), "trained"); assert got == want and len(ids) == len(mask)
    assert ids.count(IM_START) == 5 and ids.count(IM_END) == 5
