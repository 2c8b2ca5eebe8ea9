"""Pre-training on a token stream: documents are joined with a separator and attention may cross them.
Rows are windows of one long stream; no document mask, no reset of positions, and the token after a separator is trained
as well (the start of the next document, predicted from the separator and whatever came before). The last token of a window
is the first of the next one, so that each token but the very first is a target exactly once."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {"windows": "windows of the stream, one token longer than the context, overlapping by one token, [rows, time+1]; id 1 separates documents"}
SETTINGS = {}
NOTES = "Cross entropy, mean over all targets of all rows. Attention across documents and training the separator's successor are intended."

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
    stream = torch.randint(2, 32, (4 * 12 + 1,))
    stream[torch.tensor([0, 7, 18, 23, 36, 41])] = 1
    windows = torch.stack([stream[i * 12:i * 12 + 13] for i in range(4)])
    return {"model": TinyLM(), "windows": windows}

def right(model, batch):
    inputs, targets = batch["windows"][:, :-1], batch["windows"][:, 1:]
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

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
    total = 0.0
    for r in range(4):
        for t in range(1, 13):
            total -= d["model"](d["windows"][r:r + 1, :t])[0, -1].log_softmax(-1)[d["windows"][r, t]].item()
    print("loss", loss, "token by token", total / 48, "gradient norm", grad.norm().item())
    assert abs(loss - total / 48) < 1e-4 and torch.equal(d["windows"][1:, 0], d["windows"][:-1, -1]) and grad.norm() > 0
