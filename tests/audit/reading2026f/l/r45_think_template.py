"""Chat template with vanishing thoughts (Qwen3). Reasoning of assistant turns BEFORE the last user message is removed from the ids, tool results count as no user message, and only assistant turns after the last user
message are trained: earlier ones no longer look as they were generated. The end-of-turn token is trained, the newline after it is not."""
FAMILY = "chat templates"
KIND = "chat template"
INPUTS = {"messages": "list of dicts with role (system, user, assistant, tool) and content (str, may begin with <think>...</think>)"}
SETTINGS = {}
NOTES = ("Returns ids and mask, lists of the same length; mask is 1 on tokens the model must produce. Tokens are bytes, with three special ids (256 start, 257 end, 258 pad unused). The header 'assistant\\n' is not trained. "
         "A conversation without user message trains nothing but is rendered in full.")
import random
import re

START, END = 256, 257


def make(seed):
    r = random.Random(seed)
    msgs = [{"role": "system", "content": "be brief"}] if r.random() < 0.5 else []
    for k in range(r.randint(1, 3)):
        msgs.append({"role": "user", "content": "q%d" % k})
        if r.random() < 0.5:
            msgs += [{"role": "assistant", "content": "<think>t%d</think>call%d" % (k, k)}, {"role": "tool", "content": "r%d" % k}]
        msgs.append({"role": "assistant", "content": "<think>u%d</think>a%d" % (k, k)})
    return {"messages": msgs}


def right(messages):
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=len(messages))
    ids, mask = [], []

    def add(tokens, trained):
        ids.extend(tokens)
        mask.extend([int(trained)] * len(tokens))

    for i, m in enumerate(messages):
        body = m["content"]
        recent = i > last_user
        if m["role"] == "assistant" and i < last_user and last_user < len(messages):
            body = re.sub(r"^<think>.*?</think>", "", body, flags=re.S)
        trained = m["role"] == "assistant" and recent
        add([START] + list((m["role"] + "\n").encode()), False)
        add(list(body.encode()) + [END], trained)
        add(list(b"\n"), False)
    return ids, mask


if __name__ == "__main__":
    show = lambda ids: "".join({256: "<|", 257: "|>"}.get(x) or chr(x) for x in ids)
    for seed in range(40):
        msgs = make(seed)["messages"]
        ids, mask = right(msgs)
        last = max(i for i, m in enumerate(msgs) if m["role"] == "user")
        want = "".join(m["content"] + "|>" for m in msgs[last:] if m["role"] == "assistant")
        assert show([x for x, m in zip(ids, mask) if m]) == want
        assert show(ids).count("<think>") == sum(m["role"] == "assistant" for m in msgs[last:])
        # same ids as the sampler saw: the prefix up to the last turn, plus the header, is the prompt of generation
        prompt, _ = right(msgs[:-1])
        assert ids[:len(prompt)] == prompt
    print(show(ids), "\ntrained:", want)
