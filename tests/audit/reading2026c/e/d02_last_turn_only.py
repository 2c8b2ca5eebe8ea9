"""Only the last assistant turn is supervised in a multi-turn conversation. NVIDIA-NeMo/Speech#16284,
https://github.com/NVIDIA-NeMo/Speech/pull/16284, 2026. The prompt formatter split the dialogue into context (all up to
the last assistant turn) and answer (the last turn) and derived the loss mask from that split. In a
user-assistant-user-assistant dialogue the first response and its end marker got no loss; the fix supervises each
response and its end marker and still masks headers, users and tools."""
FAMILY = "agents"
KIND = "chat template"
INPUTS = {"messages": "list of dicts with role (system, user, assistant or tool) and content (list of token ids)"}
SETTINGS = {}
NOTES = ("Returns ids and mask of the same length; mask 1 = trained. Trained: the content of every assistant message "
         "and the end marker after it. Not trained: role headers, system, user and tool messages.")
import random

BOS, START, END, NEWLINE = 1, 2, 3, 4
ROLE = {"system": 5, "user": 6, "assistant": 7, "tool": 8}


def make(seed):
    rng = random.Random(seed)
    roles = ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    return {"messages": [{"role": r, "content": [rng.randrange(10, 40) for _ in range(rng.randrange(2, 6))]}
                         for r in roles]}


def _turns(messages):
    return [([START, ROLE[m["role"]], NEWLINE], list(m["content"]), [END], [NEWLINE], m["role"]) for m in messages]


def broken(messages):
    ids, last = [BOS], None
    for head, body, end, tail, role in _turns(messages):
        ids += head
        if role == "assistant":
            last = (len(ids), len(ids) + len(body) + 1)
        ids += body + end + tail
    mask = [0] * len(ids)
    if last is not None:                      # context_ids / answer_ids split
        for i in range(*last):
            mask[i] = 1
    return ids, mask


def right(messages):
    ids, mask = [BOS], [0]
    for head, body, end, tail, role in _turns(messages):
        train = int(role == "assistant")
        ids += head + body + end + tail
        mask += [0] * len(head) + [train] * (len(body) + 1) + [0] * len(tail)
    return ids, mask


if __name__ == "__main__":
    bi, bm = broken(**make(0))
    ri, rm = right(**make(0))
    assert bi == ri and bm != rm
    print("trained tokens", sum(bm), sum(rm), "of", len(ri))
