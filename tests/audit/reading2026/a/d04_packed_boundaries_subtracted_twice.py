"""Packed boundaries removed twice from the token count. unslothai/unsloth-zoo#1066,
https://github.com/unslothai/unsloth-zoo/pull/1066, 2026. num_items_in_batch counted the labels that are not -100 after
the shift and then subtracted the number of packed documents minus one; but the collator had already set the first
label of each document to -100. The denominator was too small, so loss and gradient were too large by an amount that
grew with the number of short documents per row."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "one packed row of token ids, [1, time]",
          "labels": "ids, with -100 on the first token of each document and on prompt tokens, [1, time]",
          "position_ids": "positions, from 0 in each document, [1, time]",
          "document_ids": "index of the document, [1, time]",
          "packed_seq_lengths": "lengths of the documents in the row, [documents]"}
SETTINGS = {}
NOTES = "Cross entropy, mean over the trained tokens of the row (sum over num_items_in_batch); labels are shifted inside."

class TinyLM(nn.Module):
    """One causal attention layer; returns logits [rows, time, vocabulary]."""
    def __init__(self, vocab=32, dim=16, max_pos=128):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, dim), nn.Embedding(max_pos, dim)
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids, attention_mask=None, position_ids=None, document_ids=None):
        rows, time = ids.shape
        if position_ids is None:
            position_ids = torch.arange(time).expand(rows, time)
        x = self.emb(ids) + self.pos(position_ids)
        allowed = torch.ones(time, time, dtype=torch.bool).tril()[None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, :]
        if document_ids is not None:
            allowed = allowed & (document_ids[:, :, None] == document_ids[:, None, :])
        allowed = allowed | torch.eye(time, dtype=torch.bool)[None]
        scores = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        x = x + scores.masked_fill(~allowed, -1e9).softmax(-1) @ self.v(x)
        return self.head(x)

def make(seed):
    torch.manual_seed(seed)
    lengths = torch.tensor([5, 9, 4, 7, 6])
    time = int(lengths.sum())
    ids = torch.randint(3, 32, (1, time))
    position_ids = torch.cat([torch.arange(n) for n in lengths.tolist()])[None]
    document_ids = torch.repeat_interleave(torch.arange(5), lengths)[None]
    labels = ids.clone()
    labels[position_ids < 2] = -100                   # two prompt tokens per document, the first token among them
    return {"model": TinyLM(), "ids": ids, "labels": labels, "position_ids": position_ids,
            "document_ids": document_ids, "packed_seq_lengths": lengths}

def _ce_sum(model, batch, labels):
    logits = model(batch["ids"], position_ids=batch["position_ids"], document_ids=batch["document_ids"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")

def broken(model, batch):
    count = (batch["labels"][:, 1:] != -100).sum()
    seq_lengths = batch.get("packed_seq_lengths")
    if seq_lengths is not None:
        count = count - (torch.count_nonzero(seq_lengths > 0) - 1)
    return _ce_sum(model, batch, batch["labels"]) / count

def right(model, batch):
    labels = batch["labels"].clone()
    seq_lengths = batch.get("packed_seq_lengths")
    if seq_lengths is not None:
        labels[:, seq_lengths.cumsum(0)[:-1]] = -100  # a no-op where the collator did it already
    return _ce_sum(model, batch, labels) / (labels[:, 1:] != -100).sum()

def grads(fn):
    d = make(0)
    model = d.pop("model")
    out = fn(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

if __name__ == "__main__":
    (lb, gb), (lr, gr) = grads(broken), grads(right)
    print("loss", lb, lr, "ratio of gradient norms", (gb.norm() / gr.norm()).item())
    assert gb.norm() / gr.norm() > 1.05
