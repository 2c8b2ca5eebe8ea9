"""Loss mask from a scan over the rendered tokens trains the template's own separator tokens. OpenHands/codescout#60,
https://github.com/OpenHands/codescout/pull/60, 2026. The trajectory-wise trainer found the assistant tokens by looking for
the header of an assistant turn and took everything up to the next <|im_start|> as generated. The newline of the header and
the newline that the template puts behind <|im_end|> are written by the template and never by the model, but got mask 1, so
the policy was trained on tokens that it did not sample."""
FAMILY = "agents"
KIND = "chat template"
INPUTS = {"messages": "list of dicts with role (system, user, assistant, tool) and content (words separated by one space); an agent trajectory of several turns"}
SETTINGS = {}
NOTES = ("Returns (ids, mask), two lists of the same length. ChatML layout: every turn is <|im_start|> role newline content <|im_end|> newline. "
         "mask is 1 exactly on the tokens that the model generates: the content of the assistant turns and the <|im_end|> that closes them; "
         "headers, the newlines of the template, tool observations, user and system turns are 0. No generation prompt is added. All assistant turns are trained.")
import random

IM_START, IM_END, NL = 1, 2, 3
ROLES = {"system": 4, "user": 5, "assistant": 6, "tool": 7}
WORDS = "sun moon tree call find file open read write done yes no one two three four".split()


def encode(text):
    return [10 + WORDS.index(w) for w in text.split()]


def render(messages):
    ids = []
    for m in messages:
        ids += [IM_START, ROLES[m["role"]], NL] + encode(m["content"]) + [IM_END, NL]
    return ids


def make(seed):
    r = random.Random(seed)
    def say():
        return " ".join(r.choice(WORDS) for _ in range(r.randint(1, 5)))
    messages = [{"role": "system", "content": say()}, {"role": "user", "content": say()}]
    for _ in range(r.randint(1, 3)):
        messages += [{"role": "assistant", "content": say()}, {"role": "tool", "content": say()}]
    messages.append({"role": "assistant", "content": say()})
    return {"messages": messages}


def broken(messages):
    ids = render(messages)
    mask, inside = [], False
    for i, t in enumerate(ids):
        if t == IM_START:
            inside = False
        mask.append(1 if inside else 0)
        if i > 0 and ids[i - 1] == IM_START and t == ROLES["assistant"]:
            inside = True
    return ids, mask


def right(messages):
    ids = render(messages)
    mask, inside = [], False
    for i, t in enumerate(ids):
        mask.append(1 if inside else 0)
        if i > 1 and ids[i - 2] == IM_START and ids[i - 1] == ROLES["assistant"] and t == NL:
            inside = True
        elif t == IM_END:
            inside = False
    return ids, mask


if __name__ == "__main__":
    x = make(0)
    for m in x["messages"]:
        print(m)
    (i, a), (j, b) = broken(**x), right(**x)
    print(i); print(a); print(b)
    assert i == j and a != b
    assert sum(b) == sum(len(m["content"].split()) + 1 for m in x["messages"] if m["role"] == "assistant")
    print("trained tokens: broken", sum(a), "right", sum(b))
