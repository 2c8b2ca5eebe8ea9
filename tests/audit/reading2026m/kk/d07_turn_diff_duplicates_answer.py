"""Turn-by-turn rendering duplicates earlier answers with reasoning templates. NVIDIA-NeMo/RL#2821,
https://github.com/NVIDIA-NeMo/RL/issues/2821, 2026. `get_formatted_message_log` takes for each turn what differs from the previous render. Reasoning
templates drop the <think> block of an earlier assistant turn as soon as a later turn exists, so the renders part ways in the middle of that
turn, and its answer is put a second time into the chunk of the next turn: each earlier answer appears twice in the training sequence."""
import random

FAMILY = "data stages, collators and chat templates"
KIND = "chat template"
INPUTS = {"messages": "conversation, a list of {'role': 'user' or 'assistant', 'content': str, optional 'think': str on assistant turns}; the last message is from the assistant"}
SETTINGS = {}
NOTES = (
    "Renders a conversation for SFT. Template: each message is <role> words <end>; an assistant message after the last user message "
    "is <assistant> <think> reasoning </think> words <end> (the think block only if there is reasoning), an earlier assistant message is shown without its think block. The ids "
    "are those of the full conversation rendered once, so that every message occurs exactly once, in order, as the model sees it at inference. mask is 1 for "
    "the tokens the assistant writes in that render (reasoning with its two markers, words and <end>, in every assistant turn) and 0 for role tokens and user messages. Returns (ids, mask), two lists of the same length."
)
SPECIAL = {"<user>": 1, "<assistant>": 2, "<end>": 3, "<think>": 4, "</think>": 5}


def _id(word):
    return SPECIAL.get(word) or 10 + sum(ord(c) * (i + 1) for i, c in enumerate(word)) % 400


def _body(messages, i):
    last_user = max(k for k, m in enumerate(messages) if m["role"] == "user")
    m, out = messages[i], []
    if m["role"] == "assistant" and m.get("think") and i > last_user:
        out += ["<think>"] + m["think"].split() + ["</think>"]
    return out + m["content"].split() + ["<end>"]


def _render(messages):
    out = []
    for i, m in enumerate(messages):
        out += ["<%s>" % m["role"]] + _body(messages, i)
    return out


def make(seed):
    rng = random.Random(seed)
    words = "sum is of two and three then so we add get check total value five seven".split()
    say = lambda a, b: " ".join(rng.choices(words, k=rng.randint(a, b)))
    msgs = []
    for _ in range(3):
        msgs.append({"role": "user", "content": say(2, 5)})
        msgs.append({"role": "assistant", "content": say(2, 4), "think": say(3, 6)})
    return {"messages": msgs}


def broken(messages):
    ids, mask, prev = [], [], []
    for i, m in enumerate(messages):
        now = _render(messages[: i + 1])
        k = 0
        while k < len(prev) and k < len(now) and prev[k] == now[k]:
            k += 1
        chunk = now[k:]
        ids += [_id(w) for w in chunk]
        mask += [int(m["role"] == "assistant" and w != "<assistant>") for w in chunk]
        prev = now
    return ids, mask


def right(messages):
    ids, mask = [], []
    for i, m in enumerate(messages):
        chunk = ["<%s>" % m["role"]] + _body(messages, i)
        ids += [_id(w) for w in chunk]
        mask += [int(m["role"] == "assistant" and k > 0) for k in range(len(chunk))]
    return ids, mask


if __name__ == "__main__":
    for s in range(3):
        d = make(s)
        (bi, bm), (ri, rm) = broken(**d), right(**d)
        full = [_id(w) for w in _render(d["messages"])]
        print("seed", s, "tokens broken %d right %d full render %d; trained broken %d right %d" % (len(bi), len(ri), len(full), sum(bm), sum(rm)))
        assert ri == full and bi != full and len(bi) > len(ri)
        want = sum(len(m["content"].split()) + 1 for m in d["messages"] if m["role"] == "assistant") + len(d["messages"][-1]["think"].split()) + 2
        assert sum(rm) == want
