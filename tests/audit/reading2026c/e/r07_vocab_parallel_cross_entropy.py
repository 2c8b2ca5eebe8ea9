"""Cross entropy over a vocabulary that is split over ranks. Each rank holds a slice of the head and sees no other logits;
it contributes a max, a sum of exponentials and the target logit if the target is in its slice (else 0, with the index
clamped to 0 as in Megatron). The maxima are constants. Nothing in the code has a softmax over the vocabulary, yet value and
gradient equal the plain loss."""
FAMILY = "sharding"
KIND = "loss"
import torch
import torch.nn as nn
import torch.nn.functional as F
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token is a trained target, [rows, time]"}
SETTINGS = {"tp": "tensor-parallel ranks simulated in one process, 4; slices may differ in size"}
NOTES = ("Next-token cross entropy, mean over trained tokens of all rows. Equal to the unsplit loss for any tp up to the "
         "vocabulary size.")


class SplitLM(nn.Module):
    def __init__(self, vocab=30, width=16):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Parameter(torch.randn(vocab, width) * 0.5)

    def forward(self, ids):
        return self.rnn(self.tok(ids))[0]


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 30, (3, 11))
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    mask[1, 8:] = 0
    return {"model": SplitLM(), "ids": ids, "loss_mask": mask}


def right(model, batch, tp=4):
    hidden, targets = model(batch["ids"])[:, :-1], batch["ids"][:, 1:]
    start, parts = 0, []
    for weight in model.head.chunk(tp, 0):
        logits = hidden @ weight.T
        local = targets - start
        mine = (local >= 0) & (local < weight.shape[0])
        picked = logits.gather(-1, local.masked_fill(~mine, 0)[..., None])[..., 0] * mine
        parts.append((logits, picked))
        start += weight.shape[0]
    top = torch.stack([l.max(-1).values for l, _ in parts]).max(0).values.detach()       # all-reduce max
    sums = sum((l - top[..., None]).exp().sum(-1) for l, _ in parts)                     # all-reduce sum
    target = sum(p for _, p in parts) - top                                              # all-reduce sum
    mask = batch["loss_mask"][:, 1:].float()
    return ((sums.log() - target) * mask).sum() / mask.sum()


if __name__ == "__main__":
    grads, values = [], []
    for plain in (False, True):
        data = make(0)
        model = data.pop("model")
        if plain:
            logits = model(data["ids"])[:, :-1] @ model.head.T
            keep = data["loss_mask"][:, 1:].bool()
            loss = F.cross_entropy(logits[keep], data["ids"][:, 1:][keep])
        else:
            loss = right(model, data)
        loss.backward()
        values.append(loss.item())
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    print(values, "gradient gap", (grads[0] - grads[1]).abs().max().item())
    assert (grads[0] - grads[1]).abs().max() < 1e-5 and grads[0].norm() > 0
