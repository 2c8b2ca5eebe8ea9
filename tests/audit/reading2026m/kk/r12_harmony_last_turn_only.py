"""Harmony training render (OpenAI gpt-oss chat template, 2025). Only the last assistant turn is trained, although earlier assistant turns are in the ids: their reasoning was dropped from the history, so as they stand the model never
produced them. The last turn ends in <|return|>, earlier ones in <|end|>, and the second <|start|>assistant header, in the middle of the turn, is trained while the first is not."""
import random

FAMILY = "data stages, collators and chat templates"
KIND = "chat template"
INPUTS = {"messages": "conversation, list of {'role': 'user' or 'assistant', 'content': str, 'thinking': str on assistant turns}; the last message is from the assistant"}
SETTINGS = {}
NOTES = (
    "Harmony format, one id per special token and per character. User: <|start|>user<|message|>text<|end|>. Earlier assistant turns: <|start|>assistant<|channel|>final<|message|>text<|end|>, without their reasoning. Last assistant turn: <|start|>assistant<|channel|>analysis<|message|>thinking<|end|><|start|>assistant<|channel|>final<|message|>text<|return|>. "
    "mask is 1 exactly for what the model has to write in the last turn, given the generation prompt <|start|>assistant: everything after that prompt, including the header of its second message and <|return|>. Everything before, earlier assistant turns too, has mask 0, because their rendering without reasoning is not something the model should produce. Returns (ids, mask), two lists of the same length."
)
SPECIAL = {"<|start|>": 1, "<|end|>": 2, "<|message|>": 3, "<|channel|>": 4, "<|return|>": 5}


def make(seed):
    rng = random.Random(seed)
    say = lambda n: " ".join(rng.choices("add two is the sum so five then".split(), k=n))
    msgs = []
    for _ in range(3):
        msgs += [{"role": "user", "content": say(3)}, {"role": "assistant", "content": say(2), "thinking": say(4)}]
    return {"messages": msgs}


def _ids(parts):
    out = []
    for p in parts:
        out += [SPECIAL[p]] if p in SPECIAL else [ord(c) for c in p]
    return out


def right(messages):
    ids = []
    for m in messages[:-1]:
        if m["role"] == "user":
            ids += _ids(["<|start|>", "user", "<|message|>", m["content"], "<|end|>"])
        else:
            ids += _ids(["<|start|>", "assistant", "<|channel|>", "final", "<|message|>", m["content"], "<|end|>"])
    ids += _ids(["<|start|>", "assistant"])
    m = messages[-1]
    answer = _ids(["<|channel|>", "analysis", "<|message|>", m["thinking"], "<|end|>",
                   "<|start|>", "assistant", "<|channel|>", "final", "<|message|>", m["content"], "<|return|>"])
    return ids + answer, [0] * len(ids) + [1] * len(answer)


if __name__ == "__main__":
    names = {v: k for k, v in SPECIAL.items()}
    for s in range(2):
        msgs = make(s)["messages"]
        ids, mask = right(msgs)
        text = lambda xs: "".join(names.get(i) or chr(i) for i in xs)
        trained = text(i for i, k in zip(ids, mask) if k)
        print(text(ids), "\n trained:", trained)
        want = "<|channel|>analysis<|message|>%s<|end|><|start|>assistant<|channel|>final<|message|>%s<|return|>" % (msgs[-1]["thinking"], msgs[-1]["content"])
        assert trained == want and len(ids) == len(mask) and text(ids).endswith(want)
        assert text(ids).count("analysis") == 1 and text(ids).count("<|return|>") == 1
