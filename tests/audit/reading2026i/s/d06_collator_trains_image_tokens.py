"""The vision collator leaves the expanded image placeholder tokens in the labels. NielsRogge/Transformers-Tutorials#511 (fix #513), https://github.com/NielsRogge/Transformers-Tutorials/issues/511, 2026.
The LLaVA-NeXT fine-tuning collator copied input_ids to labels and masked only the padding. Since the processor expands the one <image> marker of the text to one placeholder per image patch before
the model sees it, those placeholders (often most of the row) entered the language-model loss. The fix sets them to -100 too."""
import torch

FAMILY = "data"
KIND = "collator"
INPUTS = {"rows": "list of rows {'text_ids': token ids with one image marker (id 49), 'pixels': [patches, channels]}; the number of patches differs from row to row"}
SETTINGS = {"image_id": "id of the image placeholder, 49", "pad_id": "padding id, 0 (never a real token)"}
NOTES = ("Expands the marker to one placeholder per patch, right-pads, gives input_ids, attention_mask, labels (not shifted; the model shifts), pixels (all patches of the batch one after the other). Prompt and answer text are both trained on purpose; "
         "padding and image placeholders are no targets. Any number of rows.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for n_text, patches in ((7, 4), (5, 9), (9, 6)):
        ids = torch.randint(1, 49, (n_text,), generator=g).tolist()
        ids.insert(2, 49)
        rows.append({"text_ids": ids, "pixels": torch.randn(patches, 3, generator=g)})
    return {"rows": rows}


def _expand(rows, image_id, pad_id):
    out = []
    for row in rows:
        ids = []
        for token in row["text_ids"]:
            ids += [image_id] * len(row["pixels"]) if token == image_id else [token]
        out.append(ids)
    width = max(map(len, out))
    input_ids = torch.tensor([ids + [pad_id] * (width - len(ids)) for ids in out])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in out])
    return {"input_ids": input_ids, "attention_mask": mask, "pixels": torch.cat([r["pixels"] for r in rows])}


def broken(rows, image_id=49, pad_id=0):
    batch = _expand(rows, image_id, pad_id)
    labels = batch["input_ids"].clone()
    labels[labels == pad_id] = -100
    batch["labels"] = labels
    return batch


def right(rows, image_id=49, pad_id=0):
    batch = _expand(rows, image_id, pad_id)
    labels = batch["input_ids"].clone()
    labels[labels == pad_id] = -100
    labels[labels == image_id] = -100
    batch["labels"] = labels
    return batch


if __name__ == "__main__":
    b, r = broken(**make(0)), right(**make(0))
    print("labelled tokens broken", int((b["labels"] != -100).sum()), "right", int((r["labels"] != -100).sum()))
    assert torch.equal(b["input_ids"], r["input_ids"]) and int((r["labels"] != -100).sum()) == 7 + 5 + 9
    assert not torch.equal(b["labels"], r["labels"])
