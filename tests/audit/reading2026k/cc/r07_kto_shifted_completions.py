"""KTO (arXiv 2402.01306; TRL KTOTrainer, _get_kl_dataset): besides each prompt with its own completion the batch holds each prompt with the completion of ANOTHER row, the previous one of the
batch (the first gets the last). These mismatched pairs estimate the KL term z0. It looks like rows that got out of step, but is what the method asks for; a batch of one row is
not allowed."""
FAMILY = "data"
KIND = "collator"
INPUTS = {"rows": "list of at least two dicts with prompt_ids and completion_ids (lists of token ids 1 to 39; a completion ends with EOS 2) and label (True: desirable)"}
SETTINGS = {"pad": "padding id, 0"}
NOTES = ("Returns input_ids, attention_mask, labels [rows, time] of prompt + own completion, label bool [rows], and KL_input_ids, KL_attention_mask, KL_labels [rows, time2] of prompt i + completion of row i-1 (row 0: the last row). "
         "labels and KL_labels are the ids of the completion and -100 on prompt and padding; right padding with pad. The KL part depends on the order of the rows of the batch, by design; the other columns of a row do not depend on the other rows (except for padding).")
import random
import torch


def make(seed):
    r = random.Random(seed)
    return {"rows": [{"prompt_ids": [r.randint(3, 39) for _ in range(r.randint(1, 5))],
                      "completion_ids": [r.randint(3, 39) for _ in range(r.randint(1, 6))] + [2], "label": r.random() < 0.5} for _ in range(4)]}


def pack(prompts, completions, pad):
    n = max(len(p) + len(c) for p, c in zip(prompts, completions))
    ids = torch.full((len(prompts), n), pad)
    att = torch.zeros(len(prompts), n, dtype=torch.long)
    lab = torch.full((len(prompts), n), -100)
    for i, (p, c) in enumerate(zip(prompts, completions)):
        k = len(p) + len(c)
        ids[i, :k] = torch.tensor(p + c)
        att[i, :k] = 1
        lab[i, len(p):k] = torch.tensor(c)
    return ids, att, lab


def right(rows, pad=0):
    prompts = [r["prompt_ids"] for r in rows]
    completions = [r["completion_ids"] for r in rows]
    ids, att, lab = pack(prompts, completions, pad)
    kids, katt, klab = pack(prompts, completions[-1:] + completions[:-1], pad)
    return {"input_ids": ids, "attention_mask": att, "labels": lab, "label": torch.tensor([r["label"] for r in rows]),
            "KL_input_ids": kids, "KL_attention_mask": katt, "KL_labels": klab}


if __name__ == "__main__":
    x = make(0)
    b = right(**x)
    for i, r in enumerate(x["rows"]):
        real = b["attention_mask"][i].bool()
        assert b["input_ids"][i][real].tolist() == r["prompt_ids"] + r["completion_ids"]
        real = b["KL_attention_mask"][i].bool()
        assert b["KL_input_ids"][i][real].tolist() == r["prompt_ids"] + x["rows"][i - 1]["completion_ids"]
        assert [t for t in b["KL_labels"][i].tolist() if t != -100] == x["rows"][i - 1]["completion_ids"]
    print(b["KL_input_ids"])
