"""Chat template that trains only the assistant turns marked for training; the first turns are few-shot demonstrations.
The end-of-turn token of a trained turn is trained, the role header is not, and a turn whose text is empty (a pure tool call)
still trains its end-of-turn token. A conversation can have many assistant tokens and few trained ones."""
FAMILY = "data"
KIND = "chat template"
INPUTS = {"messages": "list of {'role', 'content', 'train'}; 'train' is present on assistant turns and False for demonstrations"}
SETTINGS = {"end_id": "end of turn, 2"}
NOTES = "Returns ids and mask (1 where the token is a target). Header tokens: 3 user, 4 assistant, 5 tool. Untrained assistant turns are intended."

def make(seed):
    text = lambda i: "".join(chr(97 + (5 * i + j + seed) % 26) for j in range(4))
    messages = []
    for i in range(4):
        messages.append({"role": "user", "content": text(i)})
        messages.append({"role": "assistant", "content": text(i + 9), "train": i >= 2})
    messages.insert(6, {"role": "tool", "content": text(20)})
    messages.insert(6, {"role": "assistant", "content": "", "train": True})
    return {"messages": messages}

def right(messages, end_id=2):
    ids, mask = [], []
    for m in messages:
        header = {"user": 3, "assistant": 4, "tool": 5}[m["role"]]
        body = [ord(c) for c in m["content"]] + [end_id]
        trained = int(m["role"] == "assistant" and m["train"])
        ids += [header] + body
        mask += [0] + [trained] * len(body)
    return ids, mask

if __name__ == "__main__":
    d = make(0)
    ids, mask = right(**d)
    expected = sum(len(m["content"]) + 1 for m in d["messages"] if m.get("train"))
    print("tokens", len(ids), "trained", sum(mask), "expected", expected)
    assert sum(mask) == expected and not any(k for i, k in zip(ids, mask) if i in (3, 4, 5))
    assert len(right(d["messages"][:5])[0]) <= len(ids) and ids[:len(right(d["messages"][:5])[0])] == right(d["messages"][:5])[0]
