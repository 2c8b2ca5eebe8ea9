"""Vocabulary-parallel cross-entropy (Megatron-LM): each rank holds a slice of the head; the max and the sum of exponentials are reduced over the ranks, and the target logit is looked up with a masked
index that is clamped to 0 on the ranks that do not own it. The max is a constant on purpose, and most ranks add an exact 0 for the target."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "sharding and reductions over ranks"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]; token t+1 is the target of position t", "loss_mask": "1 where the token is trained, [rows, time], belongs to the token itself"}
SETTINGS = {"tp": "number of tensor-parallel ranks over which the vocabulary is cut, 3", "z_weight": "weight of the squared log-partition (z-loss), 1e-3"}
VALUES = {"tp": 3, "z_weight": 1e-3}
NOTES = """Next-token cross-entropy plus z_weight * logsumexp(logits)^2 per token, mean over the trained tokens of all rows. Position t predicts token t+1; column 0 of loss_mask is not used. The head's rows (vocabulary)
are cut into tp contiguous slices of equal size, the vocabulary being padded up to a multiple of tp with rows that get the logit -inf (they take no part). Each rank computes the logits of its slice; over the ranks: maximum (constant, only for numerical
stability), sum of exponentials, and the target logit, which exactly one rank owns (the others add 0). The result and gradient equal those of the unsharded loss for any tp. All parameters are used."""


class LM(nn.Module):
    def __init__(self, vocab=29, width=12):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, vocab, bias=False)

    def hidden(self, ids):
        return self.rnn(self.emb(ids))[0]


def make(seed):
    torch.manual_seed(seed)
    mask = (torch.rand(3, 8) < 0.6).long(); mask[0, 4] = 1
    return {"model": LM(), "ids": torch.randint(0, 29, (3, 8)), "loss_mask": mask}


def right(model, batch, tp=3, z_weight=1e-3):
    h = model.hidden(batch["ids"])[:, :-1].flatten(0, 1)
    target = batch["ids"][:, 1:].flatten()
    vocab = model.head.weight.shape[0]
    size = -(-vocab // tp)
    local = []
    for rank in range(tp):
        w = model.head.weight[rank * size:(rank + 1) * size]
        logits = F.pad(h @ w.t(), (0, size - len(w)), value=float("-inf"))
        local.append(logits)
    top = torch.stack([x.detach().amax(-1) for x in local]).amax(0)
    denom, picked = 0.0, 0.0
    for rank, logits in enumerate(local):
        shifted = logits - top[:, None]
        denom = denom + shifted.exp().sum(-1)
        index = target - rank * size
        mine = (index >= 0) & (index < size)
        value = shifted.gather(1, index.masked_fill(~mine, 0)[:, None])[:, 0]
        picked = picked + torch.where(mine, value, torch.zeros_like(value))
    lse = denom.log() + top
    nll = denom.log() - picked
    mask = batch["loss_mask"][:, 1:].flatten().to(nll.dtype)
    return ((nll + z_weight * lse ** 2) * mask).sum() / mask.sum()


if __name__ == "__main__":
    for tp in (1, 3, 4):
        b = make(0); m = b.pop("model")
        loss = right(m, b, tp=tp); loss.backward()
        got = [p.grad.clone() for p in m.parameters()]; m.zero_grad()
        lg = m.head(m.hidden(b["ids"]))[:, :-1].flatten(0, 1); mask = b["loss_mask"][:, 1:].flatten().float()
        nll = F.cross_entropy(lg, b["ids"][:, 1:].flatten(), reduction="none") + 1e-3 * lg.logsumexp(-1) ** 2
        ref = (nll * mask).sum() / mask.sum(); ref.backward()
        print(tp, loss.item(), ref.item(), "max gradient difference", max(float((a - p.grad).abs().max()) for a, p in zip(got, m.parameters())))
