"""Documents lose their BOS because the probe asks another way than the tokenizer is called. marin-community/marin#5034,
https://github.com/marin-community/marin/issues/5034 (fix: #5040), 2026. BatchTokenizer encoded a probe text with add_special_tokens=True, saw that
the tokenizer sets BOS itself, and switched its own prepending off; the documents were then encoded without special
tokens. All caches built after the change of the tokenizer backend had no BOS, and their losses could not be compared with older ones."""
import random

FAMILY = "data stages, collators and chat templates"
KIND = "data stage"
INPUTS = {"rows": "list of documents, each {'id': int, 'text': str}"}
SETTINGS = {"enforce_bos": "put BOS before each document, True", "enforce_eos": "put EOS after each document, True"}
NOTES = (
    "Tokenises documents for pretraining; one output row {'id', 'input_ids'} per input row, same order. With enforce_bos each document starts with "
    "exactly one BOS (id 1), with enforce_eos it ends with exactly one EOS (id 2); between them is the encoding of the text without special tokens, "
    "nothing truncated or dropped. Documents are independent of each other."
)
BOS, EOS = 1, 2


class Tokenizer:
    """Words to ids (10 and up); add_special_tokens=True puts BOS in front, and never EOS."""

    def encode(self, text, add_special_tokens=False):
        ids = [10 + sum(ord(c) * (i + 1) for i, c in enumerate(w)) % 190 for w in text.split()]
        return ([BOS] if add_special_tokens else []) + ids

    def encode_batch(self, texts, add_special_tokens=False):
        return [self.encode(t, add_special_tokens) for t in texts]


def make(seed):
    rng = random.Random(seed)
    words = "the a model loss grows falls slowly token of and data row when it ends".split()
    return {"rows": [{"id": i, "text": " ".join(rng.choices(words, k=rng.randint(2, 9)))} for i in range(6)]}


def broken(rows, enforce_bos=True, enforce_eos=True):
    tok = Tokenizer()
    probe = tok.encode("hi there", add_special_tokens=True)
    need_bos = enforce_bos and probe[0] != BOS
    need_eos = enforce_eos and probe[-1] != EOS
    out = []
    for row, ids in zip(rows, tok.encode_batch([r["text"] for r in rows])):
        if need_bos:
            ids = [BOS] + ids
        if need_eos:
            ids = ids + [EOS]
        out.append({"id": row["id"], "input_ids": ids})
    return out


def right(rows, enforce_bos=True, enforce_eos=True):
    tok = Tokenizer()
    out = []
    for row, ids in zip(rows, tok.encode_batch([r["text"] for r in rows])):
        if enforce_bos:
            ids = [BOS] + ids
        if enforce_eos:
            ids = ids + [EOS]
        out.append({"id": row["id"], "input_ids": ids})
    return out


if __name__ == "__main__":
    d = make(0)
    b, r = broken(**d), right(**d)
    print("broken", b[0], "\nright ", r[0])
    print("tokens broken %d right %d" % (sum(len(x["input_ids"]) for x in b), sum(len(x["input_ids"]) for x in r)))
    assert all(x["input_ids"][0] == BOS and x["input_ids"][-1] == EOS for x in r)
    assert all(x["input_ids"].count(BOS) == 1 for x in r) and not any(BOS in x["input_ids"] for x in b)
