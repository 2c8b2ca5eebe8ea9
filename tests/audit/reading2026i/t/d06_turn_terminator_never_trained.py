"""The Gemma turn terminator is never trained. axolotl-ai-cloud/axolotl#3754, https://github.com/axolotl-ai-cloud/axolotl/issues/3754, 2026.
The chat_template strategy defaults eot_tokens to [tokenizer.eos_token]. Gemma ends a turn with <end_of_turn> (106), not
with <eos> (1), so the terminator after an assistant turn always kept the label -100. The model learns the answer, but
never to stop; loss curves look healthy because the missing token is not in the loss."""
FAMILY = "data stages"
KIND = "chat template"
INPUTS = {"messages": "list of {role: user|assistant, content: str}"}
SETTINGS = {}
NOTES = ("Returns ids and a 0/1 mask of trained tokens. Trained: the content of each assistant turn and the token that ends that turn (train_on_eot: turn). "
         "Not trained: bos, turn headers, user turns, the newline after a turn. Ids: bos 2, eos 1, <start_of_turn> 105, <end_of_turn> 106, newline 107, roles 108/109, characters 3..98.")
BOS, EOS, SOT, EOT, NL = 2, 1, 105, 106, 107
ROLE = {"user": 108, "assistant": 109}

def make(seed):
    words = ["hello", "what is 2+2", "four", "and 3+3", "six", "thanks", "bye"]
    k = seed % 3
    turns = words[k:k + 4]
    return {"messages": [{"role": "user" if i % 2 == 0 else "assistant", "content": w} for i, w in enumerate(turns)]}

def encode(text):
    return [3 + ord(c) % 96 for c in text]

def render(messages):
    ids, spans = [BOS], []
    for m in messages:
        ids += [SOT, ROLE[m["role"]], NL]
        a = len(ids)
        ids += encode(m["content"])
        spans.append((m["role"], a, len(ids)))
        ids += [EOT, NL]
    return ids, spans

def build(messages, eot_ids):
    ids, spans = render(messages)
    mask = [0] * len(ids)
    for role, a, e in spans:
        if role != "assistant":
            continue
        for i in range(a, e):
            mask[i] = 1
        if e < len(ids) and ids[e] in eot_ids:   # the token right after the turn ends it
            mask[e] = 1
    return ids, mask

def broken(messages):
    return build(messages, eot_ids={EOS})

def right(messages):
    return build(messages, eot_ids={EOS, EOT})

if __name__ == "__main__":
    m = make(0)["messages"]
    (i, a), (j, b) = broken(m), right(m)
    print("trained tokens: broken", sum(a), "right", sum(b), "terminators trained:", sum(y for x, y in zip(i, a) if x == EOT), sum(y for x, y in zip(j, b) if x == EOT))
    assert i == j and sum(b) - sum(a) == 2
