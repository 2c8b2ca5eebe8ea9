"""Qwen3-style template: the reasoning of old assistant turns is dropped, and only turns after the last user query are trained.
Earlier assistant turns stay in the context with mask 0, since they are rendered without the reasoning that the model would have
written there; turns inside the current tool loop keep it. Tool results are sent in a user-role block, yet they are no new query."""
FAMILY = "agents"
KIND = "chat template"
INPUTS = {"messages": "list of dicts: role (system, user, assistant, tool), content, and for assistant also reasoning"}
SETTINGS = {}
NOTES = ("Byte tokens plus six special ids; special text in a content is encoded as bytes, never as a special id. mask 1 = trained. Trained: "
         "think block, content and <|im_end|> of assistant turns after the last user message; not the newline after <|im_end|>, not the header. "
         "Earlier assistant turns are trained by other samples made of prefixes of the conversation. Neighbouring tool messages share one block. "
         "The last message must be an assistant turn and each trained turn must have a reasoning, else ValueError.")
import random

START, END, THINK, UNTHINK, TOOLR, UNTOOLR = 256, 257, 258, 259, 260, 261


def _b(text):
    return list(text.encode("utf-8"))


def _render(messages, generation_prompt=False):
    ids, mask = [], []

    def add(tokens, trained=0):
        ids.extend(tokens)
        mask.extend([trained] * len(tokens))

    query = max(i for i, m in enumerate(messages) if m["role"] == "user")
    for i, m in enumerate(messages):
        if m["role"] in ("system", "user"):
            add([START] + _b(m["role"] + "\n" + m["content"]) + [END] + _b("\n"))
        elif m["role"] == "tool":
            if i == 0 or messages[i - 1]["role"] != "tool":
                add([START] + _b("user"))
            add(_b("\n") + [TOOLR] + _b("\n" + m["content"] + "\n") + [UNTOOLR])
            if i + 1 == len(messages) or messages[i + 1]["role"] != "tool":
                add([END] + _b("\n"))
        elif m["role"] == "assistant":
            add([START] + _b("assistant\n"))
            if i > query:
                if not m.get("reasoning"):
                    raise ValueError("a trained turn needs its reasoning")
                add([THINK] + _b("\n" + m["reasoning"].strip("\n") + "\n") + [UNTHINK] + _b("\n\n"), 1)
            add(_b(m["content"]) + [END], int(i > query))
            add(_b("\n"))
        else:
            raise ValueError(m["role"])
    if generation_prompt:
        add([START] + _b("assistant\n"))
    return ids, mask


def right(messages):
    if messages[-1]["role"] != "assistant":
        raise ValueError("the last message must be an assistant turn")
    return _render(messages)


def make(seed):
    r = random.Random(seed)
    w = lambda k: " ".join(r.choice(["sum", "file", "open", "seven", "tree", "map"]) for _ in range(k))
    messages = [{"role": "system", "content": w(3)}]
    for _ in range(r.randint(1, 2)):
        messages += [{"role": "user", "content": w(4)}, {"role": "assistant", "reasoning": w(5), "content": w(3)}]
    messages.append({"role": "user", "content": w(4)})
    for _ in range(r.randint(1, 2)):
        messages.append({"role": "assistant", "reasoning": w(4), "content": '<tool_call>{"name": "%s"}</tool_call>' % w(1)})
        messages += [{"role": "tool", "content": w(3)} for _ in range(r.randint(1, 2))]
    messages.append({"role": "assistant", "reasoning": w(4), "content": w(3)})
    return {"messages": messages}


if __name__ == "__main__":
    for seed in range(20):
        messages = make(seed)["messages"]
        ids, mask = right(messages)
        query = max(i for i, m in enumerate(messages) if m["role"] == "user")
        want = [0] * len(ids)
        for i, m in enumerate(messages):
            if m["role"] != "assistant":
                continue
            seen, _ = _render(messages[:i], True)                 # what the model sees when it writes turn i
            exact = ids[:len(seen)] == seen
            if i > query:
                assert exact
                out = [THINK] + _b("\n" + m["reasoning"] + "\n") + [UNTHINK] + _b("\n\n" + m["content"]) + [END]
                assert ids[len(seen):len(seen) + len(out)] == out  # and what it writes
                want[len(seen):len(seen) + len(out)] = [1] * len(out)
            else:
                assert ids[len(seen)] != THINK                     # an old turn is not what the model wrote
        assert want == mask
    print("ok", len(ids), "ids,", sum(mask), "trained; prefix property holds for every trained turn")
