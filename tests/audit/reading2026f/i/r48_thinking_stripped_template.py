"""Qwen3-style chat template for tool agents. Reasoning of assistant turns BEFORE the last user message is cut out of the text (not merely masked), later reasoning stays because a tool loop needs it; tool results are
wrapped in a USER turn, adjacent ones share one turn, and they are never trained. The same message renders differently as the talk goes on."""
FAMILY = "chat template"
KIND = "chat template"
INPUTS = {"messages": "list of {'role': system|user|assistant|tool, 'content': text, optional 'thinking': text}"}
SETTINGS = {}
NOTES = "Returns (ids, mask) of equal length; ids are UTF-8 bytes, specials are 256.. . Trained: only assistant turns AFTER the last user message (the earlier ones were shown without their reasoning and would teach to skip it): thinking, content and the end-of-turn token, not the header. Not prefix-stable across user turns, by design."
S, E, T0, T1, R0, R1 = 256, 257, 258, 259, 260, 261     # turn start, turn end, think open/close, tool response open/close


def make(seed):
    m = [{"role": "system", "content": "s"}, {"role": "user", "content": f"u{seed}"}, {"role": "assistant", "thinking": "old", "content": "a"},
         {"role": "user", "content": "v"}, {"role": "assistant", "thinking": "t1", "content": "call"}, {"role": "tool", "content": "r1"}, {"role": "tool", "content": "r2"},
         {"role": "assistant", "thinking": "t2", "content": "end"}]
    return {"messages": m if seed % 2 == 0 else m[:3]}


def right(messages):
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    ids, mask = [], []

    def put(tokens, train):
        ids.extend(tokens); mask.extend([int(train)] * len(tokens))

    b = lambda s: list(s.encode())
    for i, m in enumerate(messages):
        if m["role"] == "tool":
            if messages[i - 1]["role"] != "tool":
                put([S, *b("user\n")], False)
            put([R0, *b(m["content"]), R1], False)
            if i + 1 == len(messages) or messages[i + 1]["role"] != "tool":
                put([E, *b("\n")], False)
            continue
        train = m["role"] == "assistant" and i > last_user
        put([S, *b(m["role"] + "\n")], False)
        if train and m.get("thinking"):
            put([T0, *b(m["thinking"]), T1], True)
        put([*b(m["content"]), E], train)
        put(b("\n"), False)
    return ids, mask


if __name__ == "__main__":
    show = lambda ids: "".join({S: "<s>", E: "<e>", T0: "<t>", T1: "</t>", R0: "<r>", R1: "</r>"}.get(t) or chr(t) for t in ids)
    ids, mask = right(**make(0))
    assert show(ids) == "<s>system\ns<e>\n<s>user\nu0<e>\n<s>assistant\na<e>\n<s>user\nv<e>\n<s>assistant\n<t>t1</t>call<e>\n<s>user\n<r>r1</r><r>r2</r><e>\n<s>assistant\n<t>t2</t>end<e>\n"
    assert show([t for t, k in zip(ids, mask) if k]) == "<t>t1</t>call<e><t>t2</t>end<e>"
    ids, mask = right(**make(1)); assert show([t for t, k in zip(ids, mask) if k]) == "<t>old</t>a<e>"
    print("ok", len(ids), sum(mask))
