"""GLM-4.5 convention: an assistant turn has no end token of its own; the model ends its turn by sampling the header of the next message, <|observation|> before a tool
result and <|user|> before the user. (Compare PrimeIntellect-ai/prime-rl#2644, where a role filter masked that token and the model never learned to stop.) So the loss
mask must be 1 on the first token of a user or tool message that follows an assistant message, which looks like training on the user's turn."""
FAMILY = "data"
KIND = "chat template"
INPUTS = {"messages": "list of dicts with role (system, user, assistant, tool) and content (words separated by one space); after each assistant message comes a user or tool message, or the end"}
SETTINGS = {}
NOTES = ("Returns (ids, mask), lists of the same length. Layout: prefix token, then per message its role token and its content; nothing closes a message. If the last message is from the assistant, the user token follows it as stop token. "
         "mask is 1 on the content of assistant messages and on the one token behind it (role token of the next message, or the stop token at the end), because the model samples that token to end its turn; 0 elsewhere, also on the role token of the assistant, which is part of the prompt.")
import random

PREFIX = 1
ROLES = {"system": 4, "user": 5, "assistant": 6, "tool": 7}
WORDS = "sun moon tree call find file open read write done yes no".split()


def make(seed):
    r = random.Random(seed)
    def say():
        return " ".join(r.choice(WORDS) for _ in range(r.randint(1, 5)))
    messages = [{"role": "system", "content": say()}, {"role": "user", "content": say()}]
    for _ in range(r.randint(1, 3)):
        messages += [{"role": "assistant", "content": say()}, {"role": r.choice(["tool", "user"]), "content": say()}]
    messages.append({"role": "assistant", "content": say()})
    return {"messages": messages}


def right(messages):
    ids, mask = [PREFIX], [0]
    before = None
    for m in messages:
        ids.append(ROLES[m["role"]])
        mask.append(1 if before == "assistant" else 0)
        words = [10 + WORDS.index(w) for w in m["content"].split()]
        ids += words
        mask += [1 if m["role"] == "assistant" else 0] * len(words)
        before = m["role"]
    if before == "assistant":
        ids.append(ROLES["user"])
        mask.append(1)
    return ids, mask


if __name__ == "__main__":
    x = make(0)
    ids, mask = right(**x)
    print(ids); print(mask)
    said = [m["content"].split() for m in x["messages"] if m["role"] == "assistant"]
    assert sum(mask) == sum(len(s) + 1 for s in said)
    runs, cur = [], []
    for t, m in zip(ids, mask):
        if m:
            cur.append(t)
        elif cur:
            runs.append(cur); cur = []
    if cur:
        runs.append(cur)
    assert [r[:-1] for r in runs] == [[10 + WORDS.index(w) for w in s] for s in said] and all(r[-1] in ROLES.values() for r in runs)
