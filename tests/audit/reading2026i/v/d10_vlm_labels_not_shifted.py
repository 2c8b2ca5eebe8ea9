"""Caption labels aligned with their own inputs. KempnerInstitute/KempnerForge#155,
https://github.com/KempnerInstitute/KempnerForge/pull/155, 2026. The trainer's loss compares logits[i] with labels[i] without
a shift, as the text dataset delivers next-token labels. The captioning dataset delivered labels equal to the inputs, so
each position was scored on the token it had just read and the loss fell to zero by copying."""
import random
import torch

FAMILY = "data stages"
KIND = "collator"
INPUTS = {"rows": "list of {'prompt': token ids of the question, 'caption': token ids of the answer, ends with the end id 2}"}
SETTINGS = {"max_text_len": "width of the padded row, 20", "pad_id": "padding id, 0"}
NOTES = ("Right-padded input_ids and labels; labels are already next-token labels: labels[i] is the token after "
         "input_ids[i], because the loss does not shift. Positions whose next token belongs to the prompt, the last real "
         "position and padding are -100. Longer rows are cut at max_text_len.")


def make(seed):
    r = random.Random(seed)
    ids = lambda n: [r.randrange(3, 40) for _ in range(n)]
    return {"rows": [{"prompt": ids(r.randrange(1, 6)), "caption": ids(r.randrange(3, 10)) + [2]} for _ in range(4)]}


def broken(rows, max_text_len=20, pad_id=0):
    input_ids = torch.full((len(rows), max_text_len), pad_id)
    labels = torch.full((len(rows), max_text_len), -100)
    for i, row in enumerate(rows):
        full = torch.tensor((row["prompt"] + row["caption"])[:max_text_len])
        input_ids[i, :len(full)] = full
        labels[i, :len(full)] = full
        labels[i, :len(row["prompt"])] = -100
    return {"input_ids": input_ids, "labels": labels}


def right(rows, max_text_len=20, pad_id=0):
    input_ids = torch.full((len(rows), max_text_len), pad_id)
    labels = torch.full((len(rows), max_text_len), -100)
    for i, row in enumerate(rows):
        full = torch.tensor((row["prompt"] + row["caption"])[:max_text_len])
        input_ids[i, :len(full)] = full
        labels[i, :len(full) - 1] = full[1:]
        labels[i, :len(row["prompt"]) - 1] = -100
    return {"input_ids": input_ids, "labels": labels}


if __name__ == "__main__":
    d = make(0)
    b, r = broken(**d), right(**d)
    print(r["input_ids"][0], b["labels"][0], r["labels"][0], sep="\n")
    assert not torch.equal(b["labels"], r["labels"])
    for row, lab in zip(d["rows"], r["labels"]):
        assert lab[lab >= 0].tolist() == row["caption"]
