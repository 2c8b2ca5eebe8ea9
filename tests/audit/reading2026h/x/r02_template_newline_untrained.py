"""ChatML template: the end mark of an assistant turn is trained, the newline after it is not, and only some assistant turns are trained.
The generation ends with the end mark; the newline that the template writes behind it (Qwen) is never sampled and has mask 0. The role header has
mask 0. Messages may carry train=False (weight 0 in the OpenAI and axolotl format): a wrong tool call in the history stays visible but is not trained.
Adjacent tool messages are merged in one user turn, as Qwen does."""
FAMILY = "agents"
KIND = "chat template"
INPUTS = {"messages": "list of dicts: role (system, user, assistant, tool), content (list of ids of 10 or more), optional train (bool)"}
SETTINGS = {}
NOTES = ("Ids: 1 im_start, 2 im_end, 3 newline, 4 system, 5 user, 6 assistant, 7 tool_response opens, 8 tool_response closes. The mask marks the trained targets: the content of "
         "the assistant turns with train not False and their im_end. It stands on the token itself (no shift).")
import torch

START, END, NL, SYSTEM, USER, ASSISTANT, OPEN, CLOSE = range(1, 9)
ROLE = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}


def make(seed):
    g = torch.Generator().manual_seed(seed)
    c = lambda n: torch.randint(10, 48, (n,), generator=g).tolist()
    return {"messages": [{"role": "system", "content": c(3)}, {"role": "user", "content": c(4)},
                         {"role": "assistant", "content": c(5), "train": False}, {"role": "tool", "content": c(2)}, {"role": "tool", "content": c(3)},
                         {"role": "assistant", "content": c(4)}, {"role": "tool", "content": c(2)}, {"role": "assistant", "content": c(3), "train": True}]}


def right(messages):
    ids, mask = [], []

    def put(tokens, trained):
        ids.extend(tokens)
        mask.extend([int(trained)] * len(tokens))

    for i, m in enumerate(messages):
        if m["role"] == "tool":
            if i == 0 or messages[i - 1]["role"] != "tool":
                put([START, USER], False)
            put([NL, OPEN] + m["content"] + [CLOSE], False)
            if i + 1 == len(messages) or messages[i + 1]["role"] != "tool":
                put([END, NL], False)
            continue
        trained = m["role"] == "assistant" and m.get("train", True)
        put([START, ROLE[m["role"]], NL], False)
        put(m["content"] + [END], trained)
        put([NL], False)
    return ids, mask


if __name__ == "__main__":
    m = make(0)["messages"]
    ids, mask = right(m)
    want = [t for x in m if x["role"] == "assistant" and x.get("train", True) for t in x["content"] + [END]]
    got = [t for t, k in zip(ids, mask) if k]
    print(len(ids), "tokens,", sum(mask), "trained")
    assert got == want and mask[-1] == 0 and ids[-1] == NL and ids.count(START) == 7
