"""Sequence mean in one packed row. Padding-free trainers put all sequences in a single row [1, total] with cu_seqlens and
block-diagonal attention. The GRPO-style mean over sequences of their token means becomes a weight per token of
1 / (sequences * tokens of its own sequence); no axis of the tensor is the batch."""
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "packing and positions"
KIND = "loss"
INPUTS = {"ids": "all sequences one after the other [1, total]", "cu_seqlens": "start offsets of the sequences and the total [sequences + 1]",
          "positions": "positions that start at 0 in each sequence [1, total]", "loss_mask": "1 where the token is trained [1, total]"}
SETTINGS = {}
NOTES = ("Mean over sequences of the mean cross-entropy over the sequence's trained tokens. The first token of each "
         "sequence is never a target. Attention stays inside a sequence. Each sequence has a trained token.")


class TinyLM(nn.Module):
    """Embedding with learned positions, one attention layer, head."""
    def __init__(self, vocab=32, width=16, max_pos=64):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out, self.head = nn.Linear(width, width), nn.Linear(width, vocab)

    def forward(self, ids, positions=None, mask=None):
        rows, time = ids.shape
        if positions is None:
            positions = torch.arange(time).expand(rows, time)
        if mask is None:
            mask = torch.ones(time, time, dtype=torch.bool).tril()
        x = self.tok(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.head(x + self.out(weights @ v))


def make(seed):
    torch.manual_seed(seed)
    lengths = [5, 9, 3, 7]
    cu = torch.tensor([0] + lengths).cumsum(0)
    mask = (torch.rand(1, sum(lengths)) < 0.6).float()
    mask[0, cu[1:] - 1] = 1
    return {"model": TinyLM(), "batch": {"ids": torch.randint(0, 32, (1, sum(lengths))), "cu_seqlens": cu,
                                         "positions": torch.cat([torch.arange(n) for n in lengths])[None], "loss_mask": mask}}


def right(model, batch):
    ids, cu, positions = batch["ids"], batch["cu_seqlens"], batch["positions"]
    total, n = ids.shape[1], len(cu) - 1
    doc = torch.repeat_interleave(torch.arange(n), cu[1:] - cu[:-1])
    mask = (doc[:, None] == doc[None, :]) & torch.ones(total, total, dtype=torch.bool).tril()
    logits = model(ids, positions, mask)
    keep = batch["loss_mask"][0, 1:] * (positions[0, 1:] > 0)
    nll = F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
    counts = torch.zeros(n).index_add(0, doc[1:], keep)
    return (nll * keep / counts[doc[1:]]).sum() / n


if __name__ == "__main__":
    d = make(0)
    loss = right(**d)
    loss.backward()
    b, per = d["batch"], []
    for s, e in zip(b["cu_seqlens"][:-1], b["cu_seqlens"][1:]):
        lg = d["model"](b["ids"][:, s:e])[0].log_softmax(-1)
        v = [-lg[t - 1, b["ids"][0, s + t]] for t in range(1, e - s) if b["loss_mask"][0, s + t]]
        per.append(sum(v) / len(v))
    slow = sum(per) / len(per)
    print(loss.item(), slow.item(), d["model"].head.weight.grad.norm().item())
    assert torch.allclose(loss, slow, atol=1e-5) and d["model"].head.weight.grad.norm() > 0
