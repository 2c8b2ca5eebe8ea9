"""Attention mask all ones when the pad id is 0. NVIDIA-NeMo/Automodel#3704, https://github.com/NVIDIA-NeMo/Automodel/pull/3704, 2026.
The caller computed the pad id as `pad_token_id or eos_token_id`; with pad_token_id == 0 this is the EOS id. The packaging step finds the
length of the content by stripping trailing pad tokens, searched for the wrong id, stripped nothing and made a mask of ones. The labels
were -100 over the padding anyway, so the loss curve looked normal while real tokens (in a non-causal or left-padded use) saw the pads."""
FAMILY = "data stages, collators and chat templates"
KIND = "collator"
INPUTS = {"rows": "list of {'prompt_ids': list of int, 'answer_ids': list of int ending with EOS}; no token inside is the pad id"}
SETTINGS = {"seq_length": "window to which every row is padded on the right or cut, 16", "pad_token_id": "padding id of the tokenizer, 0; None means that the tokenizer has none and EOS is used",
            "eos_token_id": "end-of-sequence id, 2"}
NOTES = """(rows) -> {input_ids, labels, attention_mask}, each [rows, seq_length] int64. Row = prompt_ids + answer_ids, cut at seq_length, padded on
the right with the tokenizer's pad id (EOS where the tokenizer has no pad id). attention_mask is 1 on the prompt and answer tokens and 0 on
every padding position. labels[t] = input_ids[t+1] (already shifted for a loss without a shift) where input_ids[t+1] is an answer token
(EOS included), and -100 elsewhere (prompt targets, padding, last position)."""
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rnd = lambda a, b: int(torch.randint(a, b, (1,), generator=g))
    tok = lambda n: torch.randint(3, 40, (n,), generator=g).tolist()
    return {"rows": [{"prompt_ids": tok(rnd(3, 7)), "answer_ids": tok(rnd(1, 6)) + [2]} for _ in range(4)]}


def _package(ids, n_prompt, n_content_cap, seq_length, pad_used, pad_token_id):
    """ids is already padded with pad_used; pad_token_id is what trailing padding is searched by"""
    n = seq_length
    while n > 0 and ids[n - 1] == pad_token_id:
        n -= 1
    if pad_token_id != pad_used or n < n_content_cap:      # EOS used as padding: the real EOS is content
        n = max(n, n_content_cap)
    labels = [ids[t + 1] if n_prompt <= t + 1 < n_content_cap else -100 for t in range(seq_length - 1)] + [-100]
    return ids, labels, [1] * n + [0] * (seq_length - n)


def _collate(rows, seq_length, pad_used, pad_search):
    out = {"input_ids": [], "labels": [], "attention_mask": []}
    for r in rows:
        ids = (r["prompt_ids"] + r["answer_ids"])[:seq_length]
        n = len(ids)
        i, l, m = _package(ids + [pad_used] * (seq_length - n), len(r["prompt_ids"]), n, seq_length, pad_used, pad_search)
        out["input_ids"].append(i); out["labels"].append(l); out["attention_mask"].append(m)
    return {k: torch.tensor(v) for k, v in out.items()}


def broken(rows, seq_length=16, pad_token_id=0, eos_token_id=2):
    pad_used = pad_token_id if pad_token_id is not None else eos_token_id      # what the tokenizer pads with
    return _collate(rows, seq_length, pad_used, pad_token_id or eos_token_id)


def right(rows, seq_length=16, pad_token_id=0, eos_token_id=2):
    pad = pad_token_id if pad_token_id is not None else eos_token_id
    return _collate(rows, seq_length, pad, pad)


if __name__ == "__main__":
    x = make(0)
    a, b = broken(**x), right(**x)
    print("attention_mask sums broken", a["attention_mask"].sum(1).tolist(), "right", b["attention_mask"].sum(1).tolist(),
          "lengths", [len(r["prompt_ids"]) + len(r["answer_ids"]) for r in x["rows"]])
    assert torch.equal(a["input_ids"], b["input_ids"]) and torch.equal(a["labels"], b["labels"])
    assert b["attention_mask"].sum(1).tolist() == [min(16, len(r["prompt_ids"]) + len(r["answer_ids"])) for r in x["rows"]]
    assert not torch.equal(a["attention_mask"], b["attention_mask"])
    c = right(**x, pad_token_id=None)
    assert torch.equal(c["attention_mask"], b["attention_mask"])
