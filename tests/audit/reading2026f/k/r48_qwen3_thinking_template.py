"""Qwen3-like chat template for training. The thinking of assistant turns BEFORE the last user question is deleted (as at inference), so only the assistant turns after it are trained;
tool results are wrapped into user turns but are no question, and neighbouring tool results share one turn. Rendering is not prefix-stable, on purpose."""
FAMILY = "chat templates"
KIND = "chat template"
INPUTS = {"messages": "list of {role: system/user/assistant/tool, content, thinking (optional, assistant only)}; at least one user message"}
SETTINGS = {}
NOTES = ("Byte tokens 0-255, 256 = <|im_start|>, 257 = <|im_end|>. mask is 1 on thinking, answer and <|im_end|> of assistant turns after the last user message; 0 on headers, "
         "the newline after <|im_end|> and everything else. Earlier assistant turns are context without thinking. A trained turn without thinking has an empty think block.")
START, END = 256, 257


def make(seed):
    return {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4", "thinking": "easy"},
                         {"role": "user", "content": "weather?" * (1 + seed % 3)}, {"role": "assistant", "content": "<call>a</call><call>b</call>", "thinking": "two tools"},
                         {"role": "tool", "content": "sun"}, {"role": "tool", "content": "rain"}, {"role": "assistant", "content": "Mixed."}]}


def right(messages):
    last_user = max(i for i, m in enumerate(messages) if m["role"] == "user")
    ids, mask = [], []

    def add(tokens, trained=0):
        tokens = list(tokens.encode()) if isinstance(tokens, str) else tokens
        ids.extend(tokens); mask.extend([trained] * len(tokens))

    for i, m in enumerate(messages):
        if m["role"] == "tool":
            if messages[i - 1]["role"] != "tool":
                add([START]); add("user")
            add("\n<tool_response>\n" + m["content"] + "\n</tool_response>")
            if i + 1 == len(messages) or messages[i + 1]["role"] != "tool":
                add([END]); add("\n")
            continue
        trained = int(m["role"] == "assistant" and i > last_user)
        add([START]); add(m["role"] + "\n")
        if trained:
            add("<think>\n" + m.get("thinking", "") + "\n</think>\n\n", 1)
        add(m["content"], trained); add([END], trained); add("\n")
    return ids, mask


def show(ids):
    return "".join({START: "<|im_start|>", END: "<|im_end|>"}.get(i) or chr(i) for i in ids)


if __name__ == "__main__":
    ids, mask = right(**make(0)); print(show(ids)); assert len(ids) == len(mask)
    trained = show([i for i, k in zip(ids, mask) if k])
    assert trained == "<think>\ntwo tools\n</think>\n\n<call>a</call><call>b</call><|im_end|><think>\n\n</think>\n\nMixed.<|im_end|>"
    assert "easy" not in show(ids) and show(ids).count("<|im_start|>user") == 3
