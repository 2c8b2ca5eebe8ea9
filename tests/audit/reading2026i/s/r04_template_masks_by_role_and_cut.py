"""Chat template with an assistant mask: trains the end-of-turn token but not the newline after it, not the header, not turns flagged train=False, and gives a cut-off last answer no end token at all (Qwen / ChatML as trained in TRL and axolotl). Tool calls written by
the assistant are trained, tool results are not, although both are wrapped in the same kind of tags. Looks odd: mask and text boundaries do not coincide, and the last row may end without an end token."""
FAMILY = "agents"
KIND = "chat template"
INPUTS = {"messages": "list of {'role': system|user|assistant|tool, 'content': ids, optional 'tool_call': ids, optional 'train': bool (default True), optional 'cut': bool, True if generation stopped at the length limit}"}
SETTINGS = {}
NOTES = ("Returns ids and a mask of the same length (1 = trained as a target). Ids: 1 start, 2 end, 3 newline, 4..7 roles system, user, assistant, tool, 8/9 open and close tool call, 10/11 open and close tool result. After an assistant message with cut=True nothing may follow. "
         "Tool results are rendered in a user turn, as in Qwen.")
ROLE = {"system": 4, "user": 5, "assistant": 6, "tool": 5}


def make(seed):
    import random
    r = random.Random(seed)
    def ids(n):
        return [r.randrange(12, 50) for _ in range(n)]
    return {"messages": [{"role": "system", "content": ids(3)}, {"role": "user", "content": ids(4)}, {"role": "assistant", "content": ids(2), "tool_call": ids(3)},
                         {"role": "tool", "content": ids(5)}, {"role": "assistant", "content": ids(3), "train": False}, {"role": "user", "content": ids(2)},
                         {"role": "assistant", "content": ids(4), "cut": True}]}


def right(messages):
    ids, mask = [], []
    for m in messages:
        body = list(m["content"])
        if m.get("tool_call"):
            body += [8] + list(m["tool_call"]) + [9]
        if m["role"] == "tool":
            body = [10] + body + [11]
        train = int(m["role"] == "assistant" and m.get("train", True))
        ids += [1, ROLE[m["role"]], 3] + body
        mask += [0, 0, 0] + [train] * len(body)
        if not m.get("cut"):
            ids += [2, 3]
            mask += [train, 0]
    return ids, mask


if __name__ == "__main__":
    m = make(0)["messages"]
    ids, mask = right(m)
    print(list(zip(ids, mask)))
    assert len(ids) == len(mask) and ids[-1] != 2 and mask[-1] == 1
    trained = [i for i, k in zip(ids, mask) if k]
    assert trained == m[2]["content"] + [8] + m[2]["tool_call"] + [9, 2] + m[6]["content"]
