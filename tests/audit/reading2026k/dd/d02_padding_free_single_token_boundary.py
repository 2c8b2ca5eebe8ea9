"""Padding-free embedding training merges a one-token sentence with the next one.
modelscope/ms-swift#9903, https://github.com/modelscope/ms-swift/issues/9903, 2026 (fix: #9904 / #9924).
Sequence boundaries in the packed row were found where the next position id is strictly smaller than the previous one;
a one-token sequence gives 0 -> 0, so it was merged with its successor. The number of sentence embeddings shrank, and
the InfoNCE groups were read from shifted sentences."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "token ids of all sentences packed in one row, [1, time]",
          "position_ids": "position in its sentence, starting at 0 in every sentence, [1, time]",
          "labels": "one entry per candidate sentence, 1 at the positive of a group and 0 at its negatives, [candidates]"}
SETTINGS = {"temperature": "InfoNCE temperature, 0.1"}
NOTES = ("InfoNCE over explicit groups. The packed sentences are, group by group: anchor, positive, negatives. A sentence's "
         "embedding is the normalized hidden state of its last token. Loss of a group: cross-entropy of anchor against "
         "positive and negatives of the same group, the positive is right. Mean over groups. Sentences may have one token. "
         "All of the model's parameters are used (it has no vocabulary head). Attention stays inside a sentence.")


class TinyLM(nn.Module):
    """One causal attention layer with learned positions; logits [rows, time, vocabulary]."""

    def __init__(self, vocabulary=24, width=16, positions=64):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(positions, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocabulary)

    def hidden(self, ids, position_ids=None):
        rows, time = ids.shape
        if position_ids is None:
            position_ids = torch.arange(time).expand(rows, time)
        x = self.embed(ids) + self.position(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        document = (position_ids == 0).cumsum(-1)
        allowed = torch.ones(time, time, dtype=torch.bool).tril() & (document[:, :, None] == document[:, None, :])
        scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~allowed, float("-inf"))
        return x + scores.softmax(-1) @ v

    def forward(self, ids, position_ids=None):
        return self.head(self.hidden(ids, position_ids))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    lengths, labels = [], []
    for negatives in (2, 4):
        n = torch.randint(2, 5, (2 + negatives,), generator=g).tolist()
        n[torch.randint(0, len(n) - 1, (1,), generator=g).item()] = 1
        lengths += n
        labels += [1] + [0] * negatives
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = torch.randint(1, 24, position_ids.shape, generator=g)
    model = TinyLM()
    model.head = nn.Identity()
    return {"model": model, "ids": ids, "position_ids": position_ids, "labels": torch.tensor(labels)}


def _infonce(sentences, labels, temperature):
    starts = (labels.nonzero().squeeze(-1) + torch.arange(int(labels.sum()))).tolist() + [len(sentences)]
    losses = []
    for a, b in zip(starts[:-1], starts[1:]):
        group = sentences[a:b]
        logits = group[0] @ group[1:].T / temperature
        losses.append(F.cross_entropy(logits[None], torch.zeros(1, dtype=torch.long)))
    return torch.stack(losses).mean()


def broken(model, batch, temperature=0.1):
    hidden = model.hidden(batch["ids"], batch["position_ids"])[0]
    position = batch["position_ids"][0]
    last = torch.cat([position[1:] < position[:-1], torch.ones(1, dtype=torch.bool)])
    return _infonce(F.normalize(hidden[last], dim=-1), batch["labels"], temperature)


def right(model, batch, temperature=0.1):
    hidden = model.hidden(batch["ids"], batch["position_ids"])[0]
    position = batch["position_ids"][0]
    last = torch.cat([position[1:] <= position[:-1], torch.ones(1, dtype=torch.bool)])
    return _infonce(F.normalize(hidden[last], dim=-1), batch["labels"], temperature)


if __name__ == "__main__":
    batch = make(0)
    model = batch.pop("model")
    b, r = broken(model, batch), right(model, batch)
    print("broken", b.item(), "right", r.item())
    assert abs(b - r) > 1e-3
