"""Left padding for generation: position ids are cumsum(mask) - 1 with the pads filled by 1 (not 0, and not -1), as in Hugging Face's prepare_inputs_for_generation; the fill is arbitrary because pads are masked. Real tokens get 0, 1, 2, ... wherever they sit."""
import torch

FAMILY = "collators"
KIND = "collator"
INPUTS = {"rows": "list of dicts with 'prompt': list of token ids, not empty"}
SETTINGS = {"pad_id": "0"}
NOTES = "Pads on the left to the longest prompt. A real token may have the pad's id: the mask comes from lengths, not from ids. Order of rows kept; last column is always a real token."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"rows": [{"prompt": torch.randint(0, 30, (n,), generator=g).tolist()} for n in (4, 1, 7)]}


def right(rows, pad_id=0):
    longest = max(len(r["prompt"]) for r in rows)
    ids = torch.tensor([[pad_id] * (longest - len(r["prompt"])) + r["prompt"] for r in rows])
    mask = torch.tensor([[0] * (longest - len(r["prompt"])) + [1] * len(r["prompt"]) for r in rows])
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


if __name__ == "__main__":
    rows = make(0)["rows"]
    out = right(rows)
    for i, r in enumerate(rows):
        keep = out["attention_mask"][i].bool()
        assert out["input_ids"][i][keep].tolist() == r["prompt"] and out["position_ids"][i][keep].tolist() == list(range(len(r["prompt"])))
        assert (out["position_ids"][i][~keep] == 1).all() and keep[-1]
    print("ok", out["position_ids"].tolist())
