"""The first token of the user's turn is trained. Models of the GLM-4.5 family have no end-of-turn token: the model ends
its turn by writing the role token of the next speaker, <|observation|> after a tool call and <|user|> otherwise
(THUDM/slime#514 and #1490 ask for it). The mask therefore covers one token that belongs to the tool or user message, and
a final <|user|> without a message."""

FAMILY = "agents"
KIND = "chat template"
INPUTS = {"messages": "list of {role: system | user | assistant | observation, content: text}"}
SETTINGS = {}
NOTES = ("ids: 1 system, 2 user, 3 assistant, 4 observation are role tokens that open a message, words are 10 ... 49. mask "
         "is 1 on the words of an assistant message and on the role token that follows it (its stop token); the "
         "assistant's own role token is given by the prompt and not trained. A conversation that ends with the assistant "
         "gets a closing <|user|>.")
ROLES = {"system": 1, "user": 2, "assistant": 3, "observation": 4}


def make(seed):
    import random
    rng = random.Random(seed)
    words = "please open the file list all names sum run done error line value five".split()
    say = lambda: " ".join(rng.choice(words) for _ in range(rng.randint(2, 5)))
    messages = [{"role": "system", "content": say()}]
    for _ in range(2):
        messages += [{"role": "user", "content": say()}, {"role": "assistant", "content": say()},
                     {"role": "observation", "content": say()}, {"role": "assistant", "content": say()}]
    return {"messages": messages}


def _encode(text):
    return [10 + sum(map(ord, w)) % 40 for w in text.split()]


def right(messages):
    ids, mask, stop = [], [], 0
    for m in messages:
        ids.append(ROLES[m["role"]])
        mask.append(stop)
        body = _encode(m["content"])
        trained = int(m["role"] == "assistant")
        ids += body
        mask += [trained] * len(body)
        stop = trained
    if stop:
        ids.append(ROLES["user"])
        mask.append(1)
    return ids, mask


if __name__ == "__main__":
    c = make(0)
    ids, mask = right(**c)
    print(ids)
    print(mask)
    # what a sampler would have produced: prompt up to the assistant's role token, then tokens until a role token
    produced, i = [], 0
    while i < len(ids):
        if ids[i] == 3:
            i += 1
            while True:
                produced.append(i)
                if ids[i] < 10:
                    break
                i += 1
        else:
            i += 1
    assert [k for k, v in enumerate(mask) if v] == produced and sum(mask) > 0
    print("trained positions = positions that the sampler writes:", produced)
