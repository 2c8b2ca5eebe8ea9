"""Chat template that trains the turn-end token of the assistant but not the newline behind it, leaves injected assistant turns untrained, and drops old reasoning.
Right: the policy samples the turn-end token itself; the newline is added by the template; a few-shot turn (train=False) was not written by the policy; reasoning of turns before the
last user message is not shown to the model at inference either, so it is neither in the ids nor in the mask."""
import random

FAMILY = "agents"
KIND = "chat template"
INPUTS = {"messages": "list of dicts: role (system, user, assistant, tool), content (list of word ids), optionally reasoning (list of word ids) and train (bool, assistant only)"}
SETTINGS = {}
NOTES = "ids and mask of equal length. Trained: reasoning that is shown, content and turn-end token of assistant turns unless train is False. Headers, newlines, tool and user turns are never trained."
START, END, NL, THINK, ETHINK = 1, 2, 3, 4, 5
ROLE = {"system": 6, "user": 7, "assistant": 8, "tool": 9}


def right(messages):
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    ids, mask = [], []

    def put(tokens, on):
        ids.extend(tokens)
        mask.extend([int(on)] * len(tokens))

    for i, m in enumerate(messages):
        put([START, ROLE[m["role"]], NL], 0)
        on = m["role"] == "assistant" and m.get("train", True)
        if m["role"] == "assistant" and m.get("reasoning") and i > last_user:
            put([THINK, *m["reasoning"], ETHINK], on)
        put(m["content"], on)
        put([END], on)
        if i < len(messages) - 1:
            put([NL], 0)
    return ids, mask


def make(seed):
    r = random.Random(seed)
    w = lambda: [r.randrange(10, 50) for _ in range(r.randint(1, 4))]
    return {"messages": [
        {"role": "system", "content": w()},
        {"role": "user", "content": w()},
        {"role": "assistant", "content": w(), "train": False},
        {"role": "user", "content": w()},
        {"role": "assistant", "content": w(), "reasoning": w()},
        {"role": "user", "content": w()},
        {"role": "assistant", "content": w(), "reasoning": w()},
        {"role": "tool", "content": w()},
        {"role": "assistant", "content": w(), "reasoning": w()},
    ]}


if __name__ == "__main__":
    ms = make(0)["messages"]
    ids, mask = right(ms)
    want = []
    for i, m in enumerate(ms):
        if m["role"] == "assistant" and m.get("train", True):
            if i > 5 and m.get("reasoning"):
                want += [THINK] + m["reasoning"] + [ETHINK]
            want += m["content"] + [END]
    got = [t for t, k in zip(ids, mask) if k]
    print("tokens", len(ids), "trained", sum(mask))
    assert got == want and len(ids) == len(mask) and ids[-1] == END
    # inside one agent run (after the last user message) ids are a prefix of the longer conversation
    a, b = right(ms[:7])[0], right(ms)[0]
    assert b[:len(a)] == a
