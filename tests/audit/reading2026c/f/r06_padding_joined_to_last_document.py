"""Right: the padding at the end of a pack is given the segment number of the last real document, so it is not masked off from it and there is no padding segment at all. Attention is causal and no trained token comes after the padding, so nothing real changes (prime-rl does this to keep boundary metadata simple)."""
import torch
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "packed documents, then padding (token 0), [rows, time]", "lengths": "lengths of the documents, [rows, documents]; their sum is at most time", "trained": "1 where the token is a trained target, [rows, time]"}
SETTINGS = {}
NOTES = "Next-token cross entropy, mean over trained target tokens of all rows; the first token of a document is never a target. Padding belongs to the last document on purpose and is never trained. All parameters are used."

class Tiny(torch.nn.Module):
    """One attention layer with rotary (relative) positions. `allowed` says which keys a query may see; causal always holds."""
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.q, self.k, self.v = (torch.nn.Linear(width, width, bias=False) for _ in range(3))
        self.head = torch.nn.Linear(width, vocab)

    @staticmethod
    def rotate(x, positions):
        half = x.shape[-1] // 2
        angle = positions[..., None].float() / 10.0 ** (torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def hidden(self, ids, positions=None, allowed=None):
        time = ids.shape[1]
        if positions is None:
            positions = torch.arange(time).expand(ids.shape)
        see = torch.ones(time, time).tril().bool().expand(ids.shape[0], time, time)
        if allowed is not None:
            see = see & (allowed | torch.eye(time).bool())
        x = self.emb(ids)
        q, k = self.rotate(self.q(x), positions), self.rotate(self.k(x), positions)
        scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~see, float("-inf"))
        return x + scores.softmax(-1) @ self.v(x)

    def forward(self, ids, positions=None, allowed=None):
        return self.head(self.hidden(ids, positions, allowed))
def make(seed):
    torch.manual_seed(seed)
    ids, trained = torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16)
    lengths = torch.tensor([[5, 6], [4, 9]])
    for r in range(2):
        at = 0
        for n in lengths[r].tolist():
            ids[r, at:at + n] = torch.randint(1, 32, (n,))
            trained[r, at + 2:at + n] = 1
            at += n
    return {"model": Tiny(), "ids": ids, "lengths": lengths, "trained": trained}

def split(made):
    return made["model"], {k: v for k, v in made.items() if k != "model"}
def right(model, batch):
    ids, time = batch["ids"], batch["ids"].shape[1]
    lengths = batch["lengths"].clone()
    lengths[:, -1] += time - lengths.sum(1)  # padding counts as the end of the last document
    ends = lengths.cumsum(1)
    segments = (torch.arange(time)[None, :, None] >= ends[:, None, :]).sum(-1)
    starts = (ends - lengths).gather(1, segments)
    same = segments[:, :, None] == segments[:, None, :]
    logits = model(ids, torch.arange(time) - starts, same)
    nll = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    mask = batch["trained"][:, 1:]
    return (nll * mask).sum() / mask.sum()

def slow(model, batch):
    total, n = 0.0, 0.0
    for r in range(batch["ids"].shape[0]):
        at = 0
        for length in batch["lengths"][r].tolist():
            doc, mask = batch["ids"][r, at:at + length], batch["trained"][r, at + 1:at + length]
            total = total + (F.cross_entropy(model(doc[None])[0, :-1], doc[1:], reduction="none") * mask).sum()
            n, at = n + mask.sum(), at + length
    return total / n

def grads(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])
if __name__ == "__main__":
    model, batch = split(make(0))
    a, b = right(model, batch), slow(model, batch)
    print("loss", a.item(), b.item(), "gradient", float(grads(a, model).norm()))
    assert torch.allclose(a, b, atol=1e-5) and torch.allclose(grads(a, model), grads(b, model), atol=1e-5)
