"""Completion mask built from one EOS id while generation stops on several. huggingface/trl#7039,
https://github.com/huggingface/trl/pull/7039, 2026. The model's generation config declares several stop ids and the
chat template ends an assistant turn with a secondary one; the trainer compared the completion with the tokenizer's
single EOS id only. A completion that stopped on the secondary id kept whatever followed it in the loss mask, and was
counted (and with mask_truncated dropped) as truncated."""
FAMILY = "agents"
KIND = "collator"
INPUTS = {"rows": "list of dicts with prompt_ids and completion_ids (lists of ints); the batch generator fills a "
                  "finished completion up with pad ids, or with further sampled ids, up to the common length"}
SETTINGS = {"eos_token_id": "the tokenizer's EOS id, 2", "stop_ids": "all ids on which generation stops, (2, 7)",
            "pad_id": "padding id, 0"}
NOTES = ("completion_mask is 1 for the completion up to and including the first token on which generation stopped; "
         "truncated is 1 where the completion never stopped. Prompts are left-padded, completions right-padded. "
         "Any number of rows.")
import random

import torch


def make(seed):
    rng = random.Random(seed)
    rows = []
    for i in range(6):
        prompt = [rng.randrange(10, 30) for _ in range(rng.randrange(2, 5))]
        body = [rng.randrange(10, 30) for _ in range(rng.randrange(3, 7))]
        stop = [2, 7, 7, 2, 7, None][i]
        completion = body + ([stop] if stop is not None else [])
        tail = 10 - len(completion)
        completion += [rng.randrange(10, 30) for _ in range(tail)] if i % 2 else [0] * tail
        if stop is None:
            completion = [rng.randrange(10, 30) for _ in range(10)]
        rows.append({"prompt_ids": prompt, "completion_ids": completion})
    return {"rows": rows}


def _collate(rows, is_eos_fn, pad_id):
    width = max(len(r["prompt_ids"]) for r in rows)
    prompt = torch.tensor([[pad_id] * (width - len(r["prompt_ids"])) + r["prompt_ids"] for r in rows])
    prompt_mask = torch.tensor([[0] * (width - len(r["prompt_ids"])) + [1] * len(r["prompt_ids"]) for r in rows])
    completion = torch.tensor([r["completion_ids"] for r in rows])
    is_eos = is_eos_fn(completion)
    eos_idx = torch.full((len(rows),), completion.shape[1])
    found = is_eos.any(1)
    eos_idx[found] = is_eos.int().argmax(1)[found]
    mask = (torch.arange(completion.shape[1]) <= eos_idx[:, None]).int()
    return {"prompt_ids": prompt, "prompt_mask": prompt_mask, "completion_ids": completion,
            "completion_mask": mask, "truncated": (~found).int()}


def broken(rows, eos_token_id=2, stop_ids=(2, 7), pad_id=0):
    return _collate(rows, lambda c: c == eos_token_id, pad_id)


def right(rows, eos_token_id=2, stop_ids=(2, 7), pad_id=0):
    return _collate(rows, lambda c: torch.isin(c, torch.tensor(stop_ids)), pad_id)


if __name__ == "__main__":
    b, r = broken(**make(0)), right(**make(0))
    print("trained tokens", b["completion_mask"].sum(1).tolist(), r["completion_mask"].sum(1).tolist())
    print("truncated", b["truncated"].tolist(), r["truncated"].tolist())
    assert not torch.equal(b["completion_mask"], r["completion_mask"])
