"""CLIP loss with local_loss and gather_with_grad (open_clip): each rank scores only its own rows against the features of all ranks, with
labels that start at rank * rows. The ranks' losses differ, and no rank alone has the right gradient, but with all-gather's backward
(reduce-scatter SUM) and DDP's mean the result is exactly the loss over the global batch."""
import torch
import torch.nn.functional as F

FAMILY = "sharding and reductions over ranks"
KIND = "loss"
INPUTS = {"image": "image features, [pairs, 10]", "ids": "caption token ids, [pairs, time]"}
SETTINGS = {"ranks": "ranks that split the pairs, 2"}
NOTES = ("Symmetric InfoNCE: every pair is a negative of every other, so the loss is NOT separable over rows and depends on the batch size; "
         "duplicates in a batch would be false negatives. Reduction: mean over the pairs and over both directions; mean over ranks. "
         "pairs must be divisible by ranks. Logit scale is a learned log, exponentiated. All parameters are used.")


class Clip(torch.nn.Module):
    def __init__(self, vocab=31, width=12):
        super().__init__()
        self.img = torch.nn.Linear(10, width)
        self.emb = torch.nn.Embedding(vocab, width)
        self.txt = torch.nn.Linear(width, width)
        self.log_scale = torch.nn.Parameter(torch.tensor(2.0))

    def image_features(self, x):
        return F.normalize(self.img(x), dim=-1)

    def text_features(self, ids):
        return F.normalize(self.txt(self.emb(ids).mean(1)), dim=-1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    return {"model": Clip(), "image": torch.randn(8, 10, generator=g), "ids": torch.randint(0, 31, (8, 6), generator=g)}


def right(model, batch, ranks=2):
    n = batch["image"].shape[0]
    assert n % ranks == 0
    per = n // ranks
    img = [model.image_features(x) for x in batch["image"].split(per)]
    txt = [model.text_features(x) for x in batch["ids"].split(per)]
    all_img, all_txt = torch.cat(img), torch.cat(txt)                  # torch.distributed.nn.all_gather keeps the gradient
    scale = model.log_scale.exp()
    losses = []
    for r in range(ranks):
        labels = torch.arange(per) + r * per                           # own rows sit at an offset among the gathered columns
        losses.append((F.cross_entropy(scale * img[r] @ all_txt.T, labels)
                       + F.cross_entropy(scale * txt[r] @ all_img.T, labels)) / 2)
    return torch.stack(losses).mean()                                  # DDP mean


if __name__ == "__main__":
    for seed in range(3):
        d = make(seed)
        model = d.pop("model")
        for w in (1, 2, 4, 8):
            model.zero_grad()
            loss = right(model, d, ranks=w)
            loss.backward()
            grad = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            s = model.log_scale.exp() * model.image_features(d["image"]) @ model.text_features(d["ids"]).T
            ref = sum(-(s[i, i] - s[i].logsumexp(0)) - (s[i, i] - s[:, i].logsumexp(0)) for i in range(8)) / 16
            ref.backward()
            err = max((a - p.grad).abs().max().item() for a, p in zip(grad, model.parameters()))
            print(f"W={w} loss {loss:.6f} loop {ref:.6f} grad error {err:.1e}")
            assert abs(loss - ref) < 1e-5 and err < 1e-5 and all(g.abs().sum() > 0 for g in grad)
