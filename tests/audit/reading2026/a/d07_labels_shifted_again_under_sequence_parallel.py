"""Labels shifted a second time under sequence parallelism. modelscope/ms-swift#10185,
https://github.com/modelscope/ms-swift/pull/10185, 2026. The sequence-parallel input hook shifts the labels and then
shards them; with an explicit --loss_type cross_entropy the custom loss ran the ordinary causal cross entropy on those
local labels. It shifted once more, so position t was trained to predict token t+2, and the last position of each
shard was lost."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]; time is a multiple of the number of shards",
          "labels": "ids with -100 on prompt tokens, not shifted, [rows, time]"}
SETTINGS = {"shards": "size of the sequence-parallel group, 4"}
NOTES = ("Cross entropy, mean over the trained tokens of all rows and all shards. The ranks of the group are simulated in "
         "one process: attention sees the whole sequence, logits and labels are cut into equal pieces of time.")

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
    ids = torch.randint(3, 32, (3, 24))
    labels = ids.clone()
    for r in range(3):
        labels[r, :5 + 2 * r] = -100
    return {"model": TinyLM(), "ids": ids, "labels": labels}

def split_inputs(model, batch, shards):
    logits = model(batch["ids"])
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)         # shifted once, before the cut
    return logits.chunk(shards, 1), labels.chunk(shards, 1)

def broken(model, batch, shards=4):
    total, count = 0.0, 0
    for logits, labels in zip(*split_inputs(model, batch, shards)):
        shift_logits, shift_labels = logits[:, :-1], labels[:, 1:]
        total = total + F.cross_entropy(shift_logits.flatten(0, 1), shift_labels.flatten(), ignore_index=-100, reduction="sum")
        count = count + (shift_labels != -100).sum()
    return total / count

def right(model, batch, shards=4):
    total, count = 0.0, 0
    for logits, labels in zip(*split_inputs(model, batch, shards)):
        total = total + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        count = count + (labels != -100).sum()
    return total / count

def grads(fn):
    d = make(0)
    model = d.pop("model")
    out = fn(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

if __name__ == "__main__":
    (lb, gb), (lr, gr) = grads(broken), grads(right)
    d = make(0)
    plain = F.cross_entropy(d["model"](d["ids"])[:, :-1].flatten(0, 1), d["labels"][:, 1:].flatten(), ignore_index=-100).item()
    print("loss", lb, lr, "unsharded", plain, "gradient difference", ((gb - gr).norm() / gr.norm()).item())
    assert abs(lr - plain) < 1e-5 and (gb - gr).norm() / gr.norm() > 0.1
