"""Reasoning chat template: <think> blocks of EARLIER assistant turns are removed from the context, so only the last assistant turn may be trained; its end token is trained, the newline after it not (Qwen3, DeepSeek-R1)."""
FAMILY = "chat template"; KIND = "chat template"
INPUTS = {"messages": "list of dict role, content; the last is assistant"}
SETTINGS = {}
NOTES = "Ids are code points, specials 1000+. Mask is 0 on all earlier assistant turns by design: they were generated with their thoughts. To train these, rows are split per turn elsewhere. Last turn's <think> is trained."
import re
IM, END = 1000, 1001
def make(seed): return {"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "<think>easy</think>4"}, {"role": "user", "content": f"+{seed}"}, {"role": "assistant", "content": "<think>hm</think>7"}]}
def right(messages):
    ids, mask = [], []
    def put(x, m): ids.extend(x); mask.extend([m] * len(x))
    for i, m in enumerate(messages):
        last = i == len(messages) - 1 and m["role"] == "assistant"
        text = m["content"] if last or m["role"] != "assistant" else re.sub(r"(?s)^<think>.*?</think>", "", m["content"])
        put([IM] + [ord(c) for c in m["role"] + "\n"], 0); put([ord(c) for c in text] + [END], int(last)); put([10], 0)
    return ids, mask
if __name__ == "__main__":
    m = make(3)["messages"]; ids, mask = right(m); s = lambda x: "".join(chr(c) if c < 1000 else "<%d>" % c for c in x)
    assert s([i for i, k in zip(ids, mask) if k]) == "<think>hm</think>7<1001>" and "easy" not in s(ids) and len(ids) == len(mask); print(repr(s(ids)))
