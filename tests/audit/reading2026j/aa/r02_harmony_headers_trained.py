"""Harmony-style (gpt-oss) template where some role headers ARE trained and the stop token depends on the kind of message.
The prompt ends at <|start|>assistant, so channel and recipient are written by the model; after an analysis message the model itself
goes on with <|end|><|start|>assistant. A tool call ends in <|call|>, the last answer in <|return|>; in the history it is stored with <|end|>."""
FAMILY = "agents"
KIND = "chat template"
INPUTS = {"messages": "list of dicts: role (system, user, assistant, or tool), content; assistant: channel (analysis, commentary, final), "
                      "recipient for calls; tool: name of the function"}
SETTINGS = {}
NOTES = ("Byte tokens plus special ids. mask 1 = trained. Trained: everything that the model emits after the last user message: from <|channel|> "
         "on where the message follows a user or tool message, and from <|start|> on where it follows an assistant message of the same run. "
         "Final answers of earlier rounds are context (mask 0) and end in <|end|>, never <|return|>; analysis of earlier rounds is absent "
         "from the data (ValueError otherwise). A call must be followed by its tool message.")
import random

START, END, MESSAGE, CHANNEL, CALL, RETURN, CONSTRAIN = range(256, 263)


def _b(text):
    return list(text.encode("utf-8"))


def right(messages):
    query = max(i for i, m in enumerate(messages) if m["role"] == "user")
    ids, mask = [], []

    def add(tokens, trained):
        ids.extend(tokens)
        mask.extend([int(trained)] * len(tokens))

    for i, m in enumerate(messages):
        if m["role"] in ("system", "user"):
            add([START] + _b(m["role"]) + [MESSAGE] + _b(m["content"]) + [END], 0)
        elif m["role"] == "tool":
            add([START] + _b("functions.%s to=assistant" % m["name"]) + [CHANNEL] + _b("commentary") + [MESSAGE] + _b(m["content"]) + [END], 0)
        else:
            now = i > query
            if not now and m["channel"] != "final":
                raise ValueError("earlier rounds keep their final message only")
            add([START] + _b("assistant"), now and messages[i - 1]["role"] == "assistant")
            head = [CHANNEL] + _b(m["channel"])
            if m.get("recipient"):
                head += _b(" to=functions." + m["recipient"] + " ") + [CONSTRAIN] + _b("json")
                stop = CALL
            elif m["channel"] == "final" and i == len(messages) - 1:
                stop = RETURN
            else:
                stop = END
            add(head + [MESSAGE] + _b(m["content"]) + [stop], now)
    return ids, mask


def make(seed):
    r = random.Random(seed)
    w = lambda k: " ".join(r.choice(["rain", "Oslo", "warm", "nine", "ask", "wind"]) for _ in range(k))
    say = lambda channel, **k: {"role": "assistant", "channel": channel, "content": w(3), **k}
    messages = [{"role": "system", "content": w(2)}]
    for _ in range(r.randint(0, 2)):
        messages += [{"role": "user", "content": w(3)}, say("final")]
    messages.append({"role": "user", "content": w(3)})
    for _ in range(r.randint(1, 2)):
        if r.random() < 0.7:
            messages.append(say("analysis"))
        messages += [say("commentary", recipient="weather"), {"role": "tool", "name": "weather", "content": w(2)}]
    messages += [say("analysis"), say("final")]
    return {"messages": messages}


if __name__ == "__main__":
    for seed in range(30):
        messages = make(seed)["messages"]
        ids, mask = right(messages)
        # slow twin: an engine that hands the prompt over, and lets the model write until <|call|> or <|return|>
        query = max(i for i, m in enumerate(messages) if m["role"] == "user")
        writes = [0] * len(ids)
        starts = [k for k, t in enumerate(ids) if t == START]
        assert len(starts) == len(messages)
        writing = False
        for i, s in enumerate(starts):
            e = starts[i + 1] if i + 1 < len(starts) else len(ids)
            for k in range(s, e):
                if messages[i]["role"] == "assistant" and i > query:
                    if not writing and k >= s + 1 + len("assistant"):
                        writing = True
                    writes[k] = int(writing)
                    if ids[k] in (CALL, RETURN):
                        writing = False
        assert writes == mask
        assert ids[-1] == RETURN and ids.count(RETURN) == 1 and mask[-1] == 1
        assert ids.count(CALL) == sum(bool(m.get("recipient")) for m in messages)
    print("ok", len(ids), sum(mask), "trained")
