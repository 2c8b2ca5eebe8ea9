"""ChatML mask: the end-of-turn token is trained, the newline after it is not, and the assistant's header is not. In ChatML
templates (Qwen, Hermes) a turn is <|im_start|>role\\n…<|im_end|>\\n. The model must learn to write <|im_end|>, after which
generation stops; the newline is added by the template. Tool results come in a user turn. A per-message key
"train": False leaves an assistant turn out (as in axolotl and ms-swift)."""
FAMILY = "agents"
KIND = "chat template"
INPUTS = {"messages": "list of {'role', 'content', optional 'train'}; roles system, user, assistant, tool"}
SETTINGS = {}
NOTES = ("Byte-level ids: characters have ids 10 + their code, <|im_start|> is 1, <|im_end|> is 2. Mask 1 on an "
         "assistant's content and its <|im_end|>, 0 on headers, on the newline after <|im_end|>, on other roles and on "
         "assistant turns with train False. Consecutive tool messages share one user turn with <r>…</r> around each.")

START, END = 1, 2


def text(s):
    return [10 + ord(c) for c in s]


def make(seed):
    return {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"add {seed} 2"},
                         {"role": "assistant", "content": "call add"}, {"role": "tool", "content": str(seed + 2)},
                         {"role": "tool", "content": "ok"}, {"role": "assistant", "content": "oops", "train": False},
                         {"role": "user", "content": "so?"}, {"role": "assistant", "content": str(seed + 2)}]}


def right(messages):
    ids, mask = [], []

    def put(tokens, trained=0):
        ids.extend(tokens)
        mask.extend([trained] * len(tokens))

    for i, m in enumerate(messages):
        role, trained = m["role"], int(m["role"] == "assistant" and m.get("train", True))
        if role == "tool":
            if i == 0 or messages[i - 1]["role"] != "tool":
                put([START] + text("user\n"))
            put(text("<r>" + m["content"] + "</r>"))
            if i + 1 == len(messages) or messages[i + 1]["role"] != "tool":
                put([END] + text("\n"))
            continue
        put([START] + text(role + "\n"))
        put(text(m["content"]) + [END], trained)
        put(text("\n"))
    return ids, mask


if __name__ == "__main__":
    ids, mask = right(**make(0))
    show = lambda t: {1: "<|im_start|>", 2: "<|im_end|>"}.get(t) or chr(t - 10)
    full, trained = "".join(map(show, ids)), "".join(show(t) for t, m in zip(ids, mask) if m)
    print(full, "trained:", trained)
    assert trained == "call add<|im_end|>2<|im_end|>" and len(ids) == len(mask)
    assert "<|im_start|>user\n<r>2</r><r>ok</r><|im_end|>\n" in full
