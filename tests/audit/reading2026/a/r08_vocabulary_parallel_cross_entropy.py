"""Cross entropy with the vocabulary cut over ranks: no rank ever sees a full softmax.
Each shard subtracts the global maximum (detached: it cancels), sums its exponentials, and contributes the target logit only
if the target lies in its range; targets of other shards are set to index 0 and their logit is multiplied by 0."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "labels": "targets, not shifted, -100 where not trained, [rows, time]"}
SETTINGS = {"shards": "tensor-parallel ranks, 4"}
NOTES = "Cross entropy, mean over trained tokens. The ranks are simulated; sums and the maximum over shards are all-reduces."

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
    ids = torch.randint(0, 32, (3, 12))
    labels = ids.clone()
    labels[:, :4] = -100
    return {"model": TinyLM(), "ids": ids, "labels": labels}

def right(model, batch, shards=4):
    pieces = model(batch["ids"])[:, :-1].chunk(shards, -1)
    labels = batch["labels"][:, 1:]
    trained = labels != -100
    top = torch.stack([p.detach().max(-1).values for p in pieces]).max(0).values
    denominator, target_logit, start = 0.0, 0.0, 0
    for p in pieces:
        p = p - top[..., None]
        inside = (labels >= start) & (labels < start + p.shape[-1])
        local = torch.where(inside, labels - start, 0)
        target_logit = target_logit + p.gather(-1, local[..., None]).squeeze(-1) * inside
        denominator = denominator + p.exp().sum(-1)
        start += p.shape[-1]
    per_token = denominator.log() - target_logit
    return (per_token * trained).sum() / trained.sum()

def grads(fn):
    d = make(0)
    model = d.pop("model")
    out = fn(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

if __name__ == "__main__":
    loss, grad = grads(right)
    dense = lambda model, batch: F.cross_entropy(model(batch["ids"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
    loss2, grad2 = grads(dense)
    print("loss", loss, loss2, "gradient difference", (grad - grad2).norm().item())
    assert abs(loss - loss2) < 1e-5 and (grad - grad2).norm() < 1e-4 and grad.norm() > 0
