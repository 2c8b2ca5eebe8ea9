"""Latents cached by loader step, loader shuffles. huggingface/diffusers#14431 (issue #14430), https://github.com/huggingface/diffusers/pull/14431, 2026.
The SD3 DreamBooth LoRA trainer filled latents_cache by walking the dataloader once and read latents_cache[step] while walking it again.
The loader shuffles, so each walk has another order: the latent of one image is trained with the caption of another. The fix keys the
cache by the index of the dataset row."""
FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of rows with index, image (a tensor) and caption (token ids)"}
SETTINGS = {"batch_size": "rows per batch, 2", "seed": "seed of the loader, 0"}
NOTES = ("One epoch: each row comes out once, in the order of the training walk of the loader, with its latent in place of its image. "
         "Order is shuffled on purpose; pairs of latent and caption must be kept. The last batch may be smaller.")
import torch
from torch.utils.data import DataLoader


def encode(image):
    return image * 0.18215 + 0.1


def collate(rows):
    return {"index": [r["index"] for r in rows], "image": torch.stack([r["image"] for r in rows]), "caption": [r["caption"] for r in rows]}


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"rows": [{"index": i, "image": torch.randn(4, generator=g), "caption": torch.randint(4, 40, (5,), generator=g).tolist()} for i in range(7)]}


def broken(rows, batch_size=2, seed=0):
    loader = DataLoader(rows, batch_size=batch_size, shuffle=True, collate_fn=collate, generator=torch.Generator().manual_seed(seed))
    latents_cache = []
    for batch in loader:
        latents_cache.append(encode(batch["image"]))
    out = []
    for step, batch in enumerate(loader):
        latents = latents_cache[step]
        for i, index in enumerate(batch["index"]):
            out.append({"index": index, "latent": latents[i], "caption": batch["caption"][i]})
    return out


def right(rows, batch_size=2, seed=0):
    loader = DataLoader(rows, batch_size=batch_size, shuffle=True, collate_fn=collate, generator=torch.Generator().manual_seed(seed))
    latents_cache = {}
    for batch in loader:
        for index, latent in zip(batch["index"], encode(batch["image"])):
            latents_cache[index] = latent
    out = []
    for step, batch in enumerate(loader):
        for i, index in enumerate(batch["index"]):
            out.append({"index": index, "latent": latents_cache[index], "caption": batch["caption"][i]})
    return out


if __name__ == "__main__":
    rows = make(0)["rows"]
    good = lambda out: sum(torch.allclose(o["latent"], encode(rows[o["index"]]["image"])) for o in out)
    print("pairs kept: broken", good(broken(rows)), "right", good(right(rows)), "of", len(rows))
    assert good(right(rows)) == 7 > good(broken(rows))
    assert sorted(o["index"] for o in broken(rows)) == list(range(7))
