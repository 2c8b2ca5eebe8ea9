"""The mask is 1 on the first token of the user's (or tool's) message.
In a template without an end-of-turn token the next role token is what the model emits to stop. So <user> or
<tool> right after an assistant turn is trained, though it opens another speaker's message, and the
assistant's own role token, which the server writes, is not. After the last turn an end token closes the text."""
import random

FAMILY = 'agents'
KIND = 'chat template'
INPUTS = {
    'messages': "list of {'role': system | user | tool | assistant, 'content': list of token ids}",
}
SETTINGS = {}
NOTES = (
    "ids of the conversation and a mask of trained tokens: the assistant's content and the token "
    'that ends its turn (the next role token, or the end token at the end of the text). No other '
    'token is trained. '
)


ROLE = {"system": 1, "user": 2, "tool": 3, "assistant": 4}
END = 0


def make(seed):
    g = random.Random(seed)
    words = lambda: [g.randint(5, 19) for _ in range(g.randint(1, 4))]
    roles = ["system", "user", "assistant", "tool", "assistant"] + (["user", "assistant"] if seed % 2 == 0 else [])
    return {"messages": [{"role": r, "content": words()} for r in roles]}


def right(messages):
    ids, mask = [], []
    before = None
    for m in messages:
        ids.append(ROLE[m["role"]])
        mask.append(1 if before == "assistant" else 0)
        own = m["role"] == "assistant"
        ids += m["content"]
        mask += [int(own)] * len(m["content"])
        before = m["role"]
    ids.append(END)
    mask.append(1 if before == "assistant" else 0)
    return ids, mask


if __name__ == "__main__":
    messages = make(0)["messages"]
    ids, mask = right(messages)
    print(ids)
    print(mask)
    # what a sampler would have produced: after each <assistant> the content and one stopping token
    expected, at = [0] * len(ids), 0
    for m in messages:
        if m["role"] == "assistant":
            for j in range(at + 1, at + 2 + len(m["content"])):
                expected[j] = 1
        at += 1 + len(m["content"])
    assert mask == expected and len(ids) == len(mask)
    turns = sum(m["role"] == "assistant" for m in messages)
    assert sum(mask) == sum(len(m["content"]) + 1 for m in messages if m["role"] == "assistant")
    print("assistant turns", turns, "trained stop tokens", turns)
