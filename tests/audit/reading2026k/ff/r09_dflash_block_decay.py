"""DFlash block drafter: overlapping random blocks, no shift between output and label, weights that decay in a block. DFlash (2026,
arXiv:2602.06036, section 4.2 and eq. 4), SpecForge: each block has one clean anchor token and mask slots; slot k predicts the token at
its own place anchor + k (not the next one), tokens are trained as often as blocks cover them, with w_k = exp(-(k - 1) / gamma), and the
loss is divided by the sum of weights."""
import torch
import torch.nn.functional as F

FAMILY = "multimodal training, multi-token prediction, speculative drafters"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token is part of the answer, [rows, time]", "hidden": "hidden states of the frozen target model, [rows, time, width], constant",
          "anchors": "positions of the blocks' anchor tokens, [rows, blocks] of ints; blocks may overlap"}
SETTINGS = {"gamma": "decay length of the weights, 2.0", "block": "block size with the anchor, 4"}
NOTES = ("Block with anchor a: slot k = 1 ... block-1 sees hidden[a], the embedding of token a and its slot vector, and predicts token a+k with weight exp(-(k-1)/gamma) if a+k is inside the row and in the answer, else 0. "
         "The anchor itself is not predicted. Loss: weighted sum of cross entropies of all rows and blocks / sum of weights. A token under two blocks counts twice. Hidden states after the anchor must not be seen. All parameters are used.")


class Draft(torch.nn.Module):
    def __init__(self, v=27, d=12, block=4):
        super().__init__()
        self.emb = torch.nn.Embedding(v, d)
        self.slot = torch.nn.Parameter(torch.randn(block - 1, d) * 0.3)
        self.fc = torch.nn.Linear(2 * d, d)
        self.mix = torch.nn.Linear(d, d)
        self.out = torch.nn.Linear(d, v, bias=False)

    def forward(self, ids, hidden):
        x = torch.tanh(self.fc(torch.cat([self.emb(ids), hidden], -1)))[..., None, :] + self.slot
        return self.out(x + torch.tanh(self.mix(x.mean(-2, keepdim=True))))


def make(seed):
    torch.manual_seed(seed)
    mask = torch.zeros(3, 13)
    mask[0, 4:13] = 1
    mask[1, 3:9] = 1
    mask[2, 6:12] = 1
    return {"model": Draft(), "ids": torch.randint(0, 27, (3, 13)), "loss_mask": mask, "hidden": torch.randn(3, 13, 12),
            "anchors": torch.tensor([[3, 5, 6, 11], [2, 4, 5, 7], [5, 7, 8, 10]])}


def right(model, batch, gamma=2.0, block=4):
    ids, mask, a = batch["ids"], batch["loss_mask"], batch["anchors"]
    width = ids.shape[1]
    at = a[..., None].expand(-1, -1, batch["hidden"].shape[-1])
    logits = model(ids.gather(1, a), batch["hidden"].gather(1, at))
    k = torch.arange(1, block)
    where = a[..., None] + k
    inside = (where < width).float()
    where = where.clamp(max=width - 1)
    rows = torch.arange(ids.shape[0])[:, None, None]
    w = torch.exp(-(k - 1) / gamma) * inside * mask[rows, where]
    nll = F.cross_entropy(logits.flatten(0, 2), ids[rows, where].flatten(), reduction="none").view(w.shape)
    return (nll * w).sum() / w.sum()


if __name__ == "__main__":
    import math
    c = make(0)
    m = c.pop("model")
    loss = right(m, c)
    loss.backward()
    num, den = 0.0, 0.0
    for i in range(3):
        for a in c["anchors"][i].tolist():
            lp = torch.log_softmax(m(c["ids"][i, a], c["hidden"][i, a]), -1)
            for k in (1, 2, 3):
                if a + k < 13 and c["loss_mask"][i, a + k]:
                    w = math.exp(-(k - 1) / 2.0)
                    num, den = num - w * lp[k - 1, c["ids"][i, a + k]].item(), den + w
    print(loss.item(), num / den, min(p.grad.norm().item() for p in m.parameters()))
    assert abs(loss.item() - num / den) < 1e-5 and all(p.grad.norm() > 0 for p in m.parameters())
