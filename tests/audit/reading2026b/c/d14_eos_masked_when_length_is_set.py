"""End token is masked out as soon as a maximum length is set. meta-pytorch/torchtune#2967, https://github.com/meta-pytorch/torchtune/pull/2967, 2026 (issue #2792).
After appending the end token the tokenizer calls one truncate helper for the ids and for the mask; the helper puts a given end value at the last place.
For the mask that value was a constant True (= not trained). So with max_seq_len set, the final end token was in the input but never trained and the model did not learn to stop."""
import random

FAMILY = "data stages"
KIND = "chat template"
INPUTS = {"messages": "a list of dicts: role (user or assistant), ids (token ids of the content), masked (True when the message is not trained)"}
SETTINGS = {"max_seq_len": "24", "eos_id": "2"}
NOTES = ("Returns token ids and a mask in the convention of this library: True = excluded from the loss. A message's tokens carry its flag, the end token follows the last message. "
         "Too long conversations are cut at max_seq_len and still end with the end token.")


def make(seed):
    r = random.Random(seed)
    words = lambda: [r.randrange(5, 40) for _ in range(r.randrange(2, 5))]
    return {"messages": [{"role": role, "ids": words(), "masked": role == "user"} for _ in range(2) for role in ("user", "assistant")]}


def truncate(values, max_seq_len, end):
    cut = values[:max_seq_len]
    if cut[-1] != end:
        cut[-1] = end
    return cut


def joined(messages, eos_id):
    ids, mask = [1], [True]
    for m in messages:
        ids += m["ids"]
        mask += [m["masked"]] * len(m["ids"])
    return ids + [eos_id], mask + [mask[-1]]


def broken(messages, max_seq_len=24, eos_id=2):
    ids, mask = joined(messages, eos_id)
    return truncate(ids, max_seq_len, eos_id), truncate(mask, max_seq_len, True)


def right(messages, max_seq_len=24, eos_id=2):
    ids, mask = joined(messages, eos_id)
    return truncate(ids, max_seq_len, eos_id), truncate(mask, max_seq_len, mask[-1])


if __name__ == "__main__":
    m = make(0)["messages"]
    for f in (broken, right):
        ids, mask = f(m)
        print(f.__name__, ids[-3:], mask[-3:])
    assert broken(m)[0] == right(m)[0] and broken(m)[1] != right(m)[1]
