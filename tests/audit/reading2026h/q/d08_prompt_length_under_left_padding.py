"""Prompt length counted without left padding when labels are built. huggingface/trl#5137 (review thread of 2026-03-03), https://github.com/huggingface/trl/pull/5137, 2026.
On-policy GOLD/GKD generation: prompts are left-padded, generation returns [padded prompt | completion]. The labels were cut at attention_mask.sum(), the number of real prompt tokens, although the completion starts at the padded prompt width.
In rows with padding the last prompt tokens became labels. The fix uses the width of the prompt tensor for the cut."""
import torch
FAMILY = "data"
KIND = "collator"
INPUTS = {"rows": "list of row dicts with prompt (list of ids) and completion (list of ids, sampled by the policy)"}
SETTINGS = {}
NOTES = "Returns input_ids, attention_mask, labels, [rows, time]. Prompts are left-padded to the longest prompt and completions right-padded to the longest completion, pad id 0 (never a real token). Labels: the completion's ids, -100 on prompt and padding; not shifted. Any number of rows."
PAD = 0


def make(seed):
    g = torch.Generator().manual_seed(seed)
    r = lambda n: torch.randint(1, 50, (n,), generator=g).tolist()
    return {"rows": [{"prompt": r(p), "completion": r(c)} for p, c in ((6, 4), (3, 5), (5, 2))]}


def _sequences(rows):
    pw, cw = max(len(r["prompt"]) for r in rows), max(len(r["completion"]) for r in rows)
    prompts = torch.tensor([[PAD] * (pw - len(r["prompt"])) + r["prompt"] for r in rows])
    comps = torch.tensor([r["completion"] + [PAD] * (cw - len(r["completion"])) for r in rows])
    return prompts, torch.cat([prompts, comps], 1)


def broken(rows):
    prompts, seq = _sequences(rows)
    lengths = (prompts != PAD).sum(1)
    att = (seq != PAD).long()
    labels = torch.full_like(seq, -100)
    for i in range(len(rows)):
        n = int(lengths[i])
        labels[i, n:] = seq[i, n:]
    labels[seq == PAD] = -100
    return {"input_ids": seq, "attention_mask": att, "labels": labels}


def right(rows):
    prompts, seq = _sequences(rows)
    width = prompts.shape[1]
    att = (seq != PAD).long()
    labels = torch.full_like(seq, -100)
    labels[:, width:] = seq[:, width:]
    labels[seq == PAD] = -100
    return {"input_ids": seq, "attention_mask": att, "labels": labels}


if __name__ == "__main__":
    rows = make(0)["rows"]
    b, r = broken(rows)["labels"], right(rows)["labels"]
    print("trained tokens per row: broken", (b != -100).sum(1).tolist(), "right", (r != -100).sum(1).tolist(), "want", [len(x["completion"]) for x in rows])
    assert (r != -100).sum(1).tolist() == [len(x["completion"]) for x in rows] and not torch.equal(b, r)
