"""Multi-token-prediction loss gets a mask that is one token early. radixark/miles#3219 and #3233, https://github.com/radixark/miles/pull/3219, 2026.
The trainer handed the model the prediction-aligned loss mask (mask[i] says whether the target at i, token i+1, is trained). The multi-token-prediction code derives its labels from the input ids and rolls the mask
together with them, so it expects the input-aligned mask (mask[i] belongs to token i). The mask was thus shifted once too often: the last prompt token was supervised by the extra head and the last response token never was. The main loss was right."""
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], no padding", "loss_mask": "1 where this token is a response token and is trained, [rows, time] (input-aligned)"}
SETTINGS = {"mtp_weight": "weight of the extra loss, 0.3"}
NOTES = ("Main loss: next-token cross-entropy, mean over trained tokens of all rows. Extra head: predicts the token two places ahead from the hidden state and the embedding of the next token; its loss is the mean over trained tokens "
         "that have a place two before them. Whether a token is a target is decided by loss_mask of that token itself. All parameters are used.")


class Tiny(nn.Module):
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.join = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        e = self.emb(ids)
        h, _ = self.rnn(e)
        nxt = torch.cat([e[:, 1:], torch.zeros_like(e[:, :1])], dim=1)
        extra = torch.tanh(self.join(torch.cat([h, nxt], dim=-1)))
        return self.head(h), self.head(extra)


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 32, (4, 12))
    mask = torch.zeros(4, 12)
    for row, (start, stop) in enumerate([(5, 12), (3, 9), (7, 10), (4, 12)]):
        mask[row, start:stop] = 1
    return {"model": Tiny(), "ids": ids, "loss_mask": mask}


def _roll(x):
    x = torch.roll(x, -1, dims=1)
    x[:, -1] = 0
    return x


def _mtp_loss(logits, ids, loss_mask):
    labels, mask = _roll(ids), _roll(loss_mask)             # next token
    labels, mask = _roll(labels), _roll(mask)               # depth 1: the one after
    ce = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(mask)
    return (ce * mask).sum() / mask.sum().clamp(min=1)


def _main_loss(logits, ids, predict_mask):
    ce = F.cross_entropy(logits.flatten(0, 1), _roll(ids).flatten(), reduction="none").view_as(predict_mask)
    return (ce * predict_mask).sum() / predict_mask.sum()


def broken(model, batch, mtp_weight=0.3):
    logits, extra = model(batch["ids"])
    full_loss_mask = _roll(batch["loss_mask"])              # aligned with the predictions
    return _main_loss(logits, batch["ids"], full_loss_mask) + mtp_weight * _mtp_loss(extra, batch["ids"], full_loss_mask)


def right(model, batch, mtp_weight=0.3):
    logits, extra = model(batch["ids"])
    full_loss_mask = _roll(batch["loss_mask"])
    return _main_loss(logits, batch["ids"], full_loss_mask) + mtp_weight * _mtp_loss(extra, batch["ids"], batch["loss_mask"])


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    b, r = broken(model, d), right(model, d)
    print("broken", b.item(), "right", r.item())
    logits, extra = model(d["ids"])
    lp = extra.log_softmax(-1)
    want = [-lp[i, t - 2, d["ids"][i, t]] for i in range(4) for t in range(2, 12) if d["loss_mask"][i, t]]
    main = [-logits.log_softmax(-1)[i, t - 1, d["ids"][i, t]] for i in range(4) for t in range(1, 12) if d["loss_mask"][i, t]]
    assert abs(r.item() - (torch.stack(main).mean() + 0.3 * torch.stack(want).mean()).item()) < 1e-5
    assert abs(b.item() - r.item()) > 1e-3
