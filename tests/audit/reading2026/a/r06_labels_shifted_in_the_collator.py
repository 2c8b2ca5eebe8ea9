"""Packed row whose labels come shifted from the collator: the loss pairs logits[t] with labels[t] and does not shift.
The label of the last token of each document is -100 (nothing follows it), not that of the first one. The loss is divided by a
count that was taken by the collator over the whole accumulation window, so a single micro-batch is not a mean."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "packed row, [1, time]", "labels": "the NEXT token of the same document, -100 at the end of a document and on prompts, [1, time]",
          "position_ids": "from 0 in each document, [1, time]", "document_ids": "document index, [1, time]",
          "window_items": "trained tokens in the whole accumulation window (this micro-batch is a part of it), a number"}
SETTINGS = {}
NOTES = ("Cross entropy, sum over trained tokens / window_items. Labels are already shifted. The micro-batch losses of a window "
         "add up to the mean of the window.")

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
    lengths = torch.tensor([6, 8, 5])
    ids = torch.randint(3, 32, (1, 19))
    position_ids = torch.cat([torch.arange(n) for n in lengths.tolist()])[None]
    document_ids = torch.repeat_interleave(torch.arange(3), lengths)[None]
    labels = ids.roll(-1, 1)
    labels[0, lengths.cumsum(0) - 1] = -100
    labels[position_ids < 1] = -100                        # the second token still belongs to the prompt
    return {"model": TinyLM(), "ids": ids, "labels": labels, "position_ids": position_ids, "document_ids": document_ids,
            "window_items": torch.tensor(40)}

def right(model, batch):
    logits = model(batch["ids"], position_ids=batch["position_ids"], document_ids=batch["document_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum") / batch["window_items"]

def grads(fn):
    d = make(0)
    model = d.pop("model")
    out = fn(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

if __name__ == "__main__":
    loss, grad = grads(right)
    d = make(0)
    total, start = 0.0, 0
    for n in (6, 8, 5):                                    # each document alone
        doc = d["ids"][:, start:start + n]
        logp = d["model"](doc).log_softmax(-1)
        total -= sum(logp[0, t - 1, doc[0, t]].item() for t in range(2, n))
        start += n
    print("loss", loss, "documents alone", total / 40, "gradient norm", grad.norm().item())
    assert abs(loss - total / 40) < 1e-4 and grad.norm() > 0
