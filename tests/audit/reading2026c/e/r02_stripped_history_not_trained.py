"""A reasoning template that drops the thoughts of past turns trains the last turn only, on purpose. Once a later user
message exists, the earlier assistant turns are rendered without their thoughts, which is text the policy never wrote in
that form, so they are context and not targets; one row is made per assistant turn elsewhere. The opening think tag is
part of the generation prompt and gets no loss, the closing one does."""
FAMILY = "agents"
KIND = "chat template"
INPUTS = {"messages": "list of dicts with role, content (token ids), and for assistants thoughts (token ids); ends with an assistant"}
SETTINGS = {}
NOTES = ("Returns ids and mask. Trained: only the thoughts, the closing tag, the content and the end marker of the last "
         "assistant message. The data stage before this one emits one prefix of the dialogue per assistant turn, so every "
         "turn is trained once, each with its thoughts.")
import random

START, END, THINK, UNTHINK = 1, 2, 3, 4
ROLE = {"user": 5, "assistant": 6, "tool": 7}


def make(seed):
    rng = random.Random(seed)
    draw = lambda: [rng.randrange(10, 40) for _ in range(rng.randrange(2, 5))]
    messages = []
    for role in ("user", "assistant", "tool", "assistant", "user", "assistant"):
        m = {"role": role, "content": draw()}
        if role == "assistant":
            m["thoughts"] = draw()
        messages.append(m)
    return {"messages": messages}


def right(messages):
    ids, mask = [], []

    def put(tokens, train):
        ids.extend(tokens)
        mask.extend([train] * len(tokens))

    for i, m in enumerate(messages):
        last = i == len(messages) - 1
        put([START, ROLE[m["role"]]], 0)
        if m["role"] == "assistant" and last:
            put([THINK], 0)
            put(m["thoughts"] + [UNTHINK], 1)
        put(m["content"] + [END], int(last and m["role"] == "assistant"))
    return ids, mask


if __name__ == "__main__":
    data = make(0)
    ids, mask = right(**data)
    last = data["messages"][-1]
    trained = [i for i, k in zip(ids, mask) if k]
    print(len(ids), sum(mask), trained)
    assert trained == last["thoughts"] + [UNTHINK] + last["content"] + [END]
    assert ids.count(THINK) == 1
