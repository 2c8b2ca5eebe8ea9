"""EOS of earlier turns stays a target although history is masked. hiyouga/LlamaFactory#10827,
https://github.com/hiyouga/LlamaFactory/pull/10827, 2026. mask_history should train the last answer only. Templates with
'efficient_eos' have no EOS token between turns; they set EOS as the target of the first token of the next user span
instead. That insertion did not look at mask_history, so with three turns one EOS of the history is still trained."""
FAMILY = "data"
KIND = "chat template"
INPUTS = {"messages": "list of {'role': 'user' or 'assistant', 'content': text}, alternating, starting with the user"}
SETTINGS = {"mask_history": "train the last answer only, True", "eos_id": "end-of-sequence id, 2"}
NOTES = ("Returns ids and a mask: 1 where the position has a target (targets are shifted by one in the loss, so the mask of "
         "position 0 is never used). The target is the token itself; in a user span the first token can have EOS as target. "
         "EOS itself is appended once, after the last answer, and is trained.")

def make(seed):
    word = lambda i: "".join(chr(97 + (7 * i + 3 * j + seed) % 26) for j in range(3 + i % 3))
    turns = [("user", "assistant")[i % 2] for i in range(6)]
    return {"messages": [{"role": r, "content": word(i)} for i, r in enumerate(turns)]}

def _pairs(messages):
    out = []
    for u, a in zip(messages[::2], messages[1::2]):
        source = [3] + [ord(c) for c in u["content"]] + [4]
        out.append((source, [ord(c) for c in a["content"]]))
    return out

def broken(messages, mask_history=True, eos_id=2):
    ids, labels, pairs = [], [], _pairs(messages)
    if mask_history:
        pairs = pairs[::-1]
    for turn, (source, target) in enumerate(pairs):
        if turn != 0:
            source_label = [eos_id] + [-100] * (len(source) - 1)
        else:
            source_label = [-100] * len(source)
        target_label = [-100] * len(target) if mask_history and turn != 0 else target
        if mask_history:
            ids, labels = source + target + ids, source_label + target_label + labels
        else:
            ids, labels = ids + source + target, labels + source_label + target_label
    ids, labels = ids + [eos_id], labels + [eos_id]
    return ids, [int(x != -100) for x in labels]

def right(messages, mask_history=True, eos_id=2):
    ids, labels, pairs = [], [], _pairs(messages)
    if mask_history:
        pairs = pairs[::-1]
    for turn, (source, target) in enumerate(pairs):
        if turn != 0 and not mask_history:
            source_label = [eos_id] + [-100] * (len(source) - 1)
        else:
            source_label = [-100] * len(source)
        target_label = [-100] * len(target) if mask_history and turn != 0 else target
        if mask_history:
            ids, labels = source + target + ids, source_label + target_label + labels
        else:
            ids, labels = ids + source + target, labels + source_label + target_label
    ids, labels = ids + [eos_id], labels + [eos_id]
    return ids, [int(x != -100) for x in labels]

if __name__ == "__main__":
    (ids, b), (ids2, r) = broken(**make(0)), right(**make(0))
    last = len(make(0)["messages"][-1]["content"]) + 1
    print("trained positions after the shift:", sum(b[1:]), sum(r[1:]), "tokens of the last answer with EOS:", last)
    assert ids == ids2 and sum(b[1:]) == last + 1 and sum(r[1:]) == last
