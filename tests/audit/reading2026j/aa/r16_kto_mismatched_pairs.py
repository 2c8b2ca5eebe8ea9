"""KTO collator (Ethayarajh et al. 2024; TRL): next to each prompt with its own completion it builds the prompt with the completion of the PREVIOUS row. The mismatched rows are no
misalignment: they estimate the KL reference point of the loss, which must not come from the trained completions. The batch is a ring, so row 0 takes the last completion."""
FAMILY = "data stages and collators"
KIND = "collator"
INPUTS = {"rows": "list of dicts: 'prompt', 'completion' (lists of ids 2..39), 'label' (True = desirable); unpaired, at least two rows"}
SETTINGS = {}
NOTES = ("Pad 0, EOS 1 ends each completion. Right padding; the two halves are padded on their own. labels and kl_labels are -100 on prompt and padding, unshifted. kl_* rows are used without gradient only. The label belongs to the matched row; kl rows have none. "
         "Needs at least 2 rows (ValueError), and the stage before should not put two completions of the same prompt next to each other. Depends on the order of rows: rotating the batch rotates the result, permuting does not permute kl_*.")
import random
import torch

PAD, EOS = 0, 1


def right(rows):
    if len(rows) < 2:
        raise ValueError("KTO needs two rows for its KL estimate")

    def build(prompts, completions, prefix):
        seqs = [(list(p), list(c) + [EOS]) for p, c in zip(prompts, completions)]
        n = max(len(p) + len(c) for p, c in seqs)
        ids = torch.full((len(seqs), n), PAD)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for i, (p, c) in enumerate(seqs):
            k = len(p) + len(c)
            ids[i, :k] = torch.tensor(p + c)
            mask[i, :k] = 1
            labels[i, len(p):k] = torch.tensor(c)
        return {prefix + "input_ids": ids, prefix + "attention_mask": mask, prefix + "labels": labels}

    prompts, own = [r["prompt"] for r in rows], [r["completion"] for r in rows]
    return {**build(prompts, own, ""), **build(prompts, own[-1:] + own[:-1], "kl_"), "desirable": torch.tensor([bool(r["label"]) for r in rows])}


def make(seed):
    r = random.Random(seed)
    seq = lambda a, b: [r.randint(2, 39) for _ in range(r.randint(a, b))]
    return {"rows": [{"prompt": seq(1, 5), "completion": seq(1, 7), "label": r.random() < 0.5} for _ in range(r.randint(2, 6))]}


if __name__ == "__main__":
    for seed in range(50):
        rows = make(seed)["rows"]
        b = right(rows)
        n = len(rows)
        for i, row in enumerate(rows):
            for prefix, c in (("", row["completion"]), ("kl_", rows[(i - 1) % n]["completion"])):
                full = row["prompt"] + c + [EOS]
                k = len(full)
                assert b[prefix + "input_ids"][i, :k].tolist() == full and (b[prefix + "input_ids"][i, k:] == PAD).all()
                assert b[prefix + "attention_mask"][i].sum() == k
                y = b[prefix + "labels"][i].tolist()
                assert y == [-100] * len(row["prompt"]) + c + [EOS] + [-100] * (len(y) - k)
            assert bool(b["desirable"][i]) == row["label"]
        # each completion is used exactly once on either side: same multiset of trained tokens
        flat = lambda t: sorted(t[t != -100].tolist())
        assert flat(b["labels"]) == flat(b["kl_labels"])
    print("ok", {k: tuple(v.shape) for k, v in b.items()})
