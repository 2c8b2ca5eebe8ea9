"""CutMix collator with the label from the clipped box. The drawn lambda is thrown away: the box is clipped at the image's border, and the label weight is recomputed from the area really pasted (Yun et al. 2019, torchvision v2.CutMix). The partner of row i is row i-1 (a roll), and labels are float distributions."""
import math
import random
import torch
FAMILY = "data stages"
KIND = "collator"
INPUTS = {"rows": "list of rows {'index': int, 'image': float tensor [3, 16, 16], 'label': class 0..9}"}
SETTINGS = {"classes": "10", "epoch": "changes the draws, 0"}
NOTES = "One box and one lambda for the whole batch (Beta(1,1) = uniform). Mixes rows of the batch by rolling, so row 0 takes its patch from the last row and a batch of one row comes out unchanged. labels: [rows, classes], each row sums to 1; two rows of the same class give a one-hot. Draws depend on epoch and the indices. Input tensors are not written to."
def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"rows": [{"index": seed * 100 + i, "image": torch.rand(3, 16, 16, generator=g), "label": int(torch.randint(10, (1,), generator=g))} for i in range(5)]}
def right(rows, classes=10, epoch=0):
    x = torch.stack([row["image"] for row in rows])
    y = torch.nn.functional.one_hot(torch.tensor([row["label"] for row in rows]), classes).float()
    r = random.Random(f"{epoch}/" + ",".join(str(row["index"]) for row in rows))
    lam = r.random()
    H, W = x.shape[-2:]
    cy, cx, half = r.randrange(H), r.randrange(W), 0.5 * math.sqrt(1 - lam)
    y0, y1 = max(int(cy - half * H), 0), min(int(cy + half * H), H)
    x0, x1 = max(int(cx - half * W), 0), min(int(cx + half * W), W)
    mixed = x.clone()
    mixed[..., y0:y1, x0:x1] = x.roll(1, 0)[..., y0:y1, x0:x1]
    lam = 1 - (y1 - y0) * (x1 - x0) / (H * W)
    return {"pixel_values": mixed, "labels": lam * y + (1 - lam) * y.roll(1, 0)}
if __name__ == "__main__":
    shares = []
    for seed in range(40):
        rows = make(seed)["rows"]
        before = [r["image"].clone() for r in rows]
        b = right(rows, epoch=seed)
        for i, row in enumerate(rows):
            other = rows[i - 1]
            own = (b["pixel_values"][i] == row["image"]).all(0)
            his = (b["pixel_values"][i] == other["image"]).all(0)
            assert (own | his).all()
            share = own.float().mean().item()
            want = torch.zeros(10); want[row["label"]] += share; want[other["label"]] += 1 - share
            assert torch.allclose(b["labels"][i], want, atol=1e-6) and torch.equal(before[i], row["image"])
        shares.append(share)
    assert torch.equal(right(rows[:1])["pixel_values"][0], rows[0]["image"])
    print("ok shares kept", [round(s, 2) for s in shares[:8]])
