"""Right: in a pack each document's positions start at its own random offset instead of 0. With rotary (relative) positions only the distances inside a document count, so the loss is the same as with reset positions; the offset trains large angles."""
import torch
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "documents packed in each row, [rows, time]", "segments": "document number of each token, [rows, time]", "offsets": "first position of each document, random from 0 to 100, [rows, documents]",
          "labels": "next token inside the document, -100 on its last token, [rows, time]"}
SETTINGS = {}
NOTES = "Next-token cross entropy, mean over labelled tokens of all rows. Documents do not see each other. Positions are offset + index inside the document; only differences matter to this model. offsets are constants; all parameters are used."

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
    ids = torch.randint(0, 32, (2, 15))
    segments, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for r, lengths in enumerate(([6, 4, 5], [3, 8, 4])):
        at = 0
        for n, length in enumerate(lengths):
            segments[r, at:at + length] = n
            labels[r, at:at + length - 1] = ids[r, at + 1:at + length]
            at += length
    return {"model": Tiny(), "ids": ids, "segments": segments, "offsets": torch.randint(0, 101, (2, 3)), "labels": labels}

def split(made):
    return made["model"], {k: v for k, v in made.items() if k != "model"}
def right(model, batch):
    seg = batch["segments"]
    same = seg[:, :, None] == seg[:, None, :]
    inside = same.tril(-1).sum(-1)  # tokens of the same document before this one
    logits = model(batch["ids"], inside + batch["offsets"].gather(1, seg), same)
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

def slow(model, batch):
    total, n = 0.0, 0
    for r in range(batch["ids"].shape[0]):
        for s in batch["segments"][r].unique():
            doc = batch["ids"][r][batch["segments"][r] == s]
            total = total + F.cross_entropy(model(doc[None])[0, :-1], doc[1:], reduction="sum")
            n += len(doc) - 1
    return total / n

def grads(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])
if __name__ == "__main__":
    model, batch = split(make(0))
    a, b = right(model, batch), slow(model, batch)
    print("loss", a.item(), b.item(), "gradient", float(grads(a, model).norm()))
    assert torch.allclose(a, b, atol=1e-4) and torch.allclose(grads(a, model), grads(b, model), atol=1e-3)
