"""MTP paths that run through image placeholders are trained. NVIDIA/Megatron-LM#6770,
https://github.com/NVIDIA/Megatron-LM/pull/6770, 2026. Multi-token prediction at depth k consumes the embeddings of the next k
tokens. The targets that are modality placeholders were masked, but not the positions whose path consumes a placeholder and whose
target is text again: depth 2 then learned to continue from the meaningless placeholder embedding, a path that never occurs in
generation."""
import torch
import torch.nn.functional as F

FAMILY = "multimodal training, multi-token prediction, speculative drafters"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]; id 3 is the image placeholder", "loss_mask": "1 where the token is a trained target (text of the sample), [rows, time]; 0 on placeholders",
          "image_feats": "features that replace the embedding at placeholders in the trunk, [rows, time, width], zero elsewhere, constant"}
SETTINGS = {"mtp_weight": "weight of the mean over depths of the MTP losses, 0.3", "depths": "number of MTP depths, 2"}
NOTES = ("Next-token cross entropy, mean over trained tokens of all rows, plus mtp_weight times the mean over depths of the MTP cross entropy; depth k at position t consumes the "
         "text embeddings of tokens t+1 ... t+k one after the other and predicts token t+k+1; it is the mean over the positions of all rows where the target is trained "
         "and none of the consumed tokens t+1 ... t+k is a placeholder (position t itself may be an image). The text embedding of the placeholder id is used nowhere. "
         "The batch always has at least one valid position in each depth.")
IMG = 3


class Mtp(torch.nn.Module):
    def __init__(self, v=31, d=16, depths=2):
        super().__init__()
        self.emb = torch.nn.Embedding(v, d)
        self.trunk = torch.nn.GRU(d, d, batch_first=True)
        self.mtp = torch.nn.ModuleList(torch.nn.Linear(2 * d, d) for _ in range(depths))
        self.out = torch.nn.Linear(d, v, bias=False)


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(5, 31, (3, 14))
    ids[0, 4:7] = IMG
    ids[1, 0:3] = IMG
    ids[2, 9] = IMG
    mask = (ids != IMG).float()
    mask[:, 0] = 0
    mask[1, 3:5] = 0
    feats = torch.randn(3, 14, 16) * (ids == IMG)[..., None]
    return {"model": Mtp(), "ids": ids, "loss_mask": mask, "image_feats": feats}


def _ce(logits, target, w):
    nll = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
    return (nll * w).sum() / w.sum()


def _trunk(model, batch):
    ids = batch["ids"]
    x = torch.where((ids == IMG)[..., None], batch["image_feats"], model.emb(ids))
    return model.trunk(x)[0]


def broken(model, batch, mtp_weight=0.3, depths=2):
    ids, mask = batch["ids"], batch["loss_mask"]
    h = _trunk(model, batch)
    loss = _ce(model.out(h[:, :-1]), ids[:, 1:], mask[:, 1:])
    extra = 0.0
    for k in range(1, depths + 1):
        n = ids.shape[1] - k - 1
        h = torch.tanh(model.mtp[k - 1](torch.cat([h[:, :n], model.emb(ids[:, k:k + n])], -1)))
        extra = extra + _ce(model.out(h), ids[:, k + 1:], mask[:, k + 1:])
    return loss + mtp_weight * extra / depths


def right(model, batch, mtp_weight=0.3, depths=2):
    ids, mask = batch["ids"], batch["loss_mask"]
    h = _trunk(model, batch)
    loss = _ce(model.out(h[:, :-1]), ids[:, 1:], mask[:, 1:])
    extra, path = 0.0, torch.ones_like(mask)
    for k in range(1, depths + 1):
        n = ids.shape[1] - k - 1
        path = path[:, :n] * (ids[:, k:k + n] != IMG)
        h = torch.tanh(model.mtp[k - 1](torch.cat([h[:, :n], model.emb(ids[:, k:k + n])], -1)))
        extra = extra + _ce(model.out(h), ids[:, k + 1:], mask[:, k + 1:] * path)
    return loss + mtp_weight * extra / depths


if __name__ == "__main__":
    c = make(0)
    m = c.pop("model")
    for f in (broken, right):
        m.zero_grad()
        l = f(m, c)
        l.backward()
        e = float(m.emb.weight.grad[IMG].norm())
        print(f.__name__, float(l), "gradient on the placeholder's text embedding", e)
        assert (e > 1e-6) == (f is broken)
