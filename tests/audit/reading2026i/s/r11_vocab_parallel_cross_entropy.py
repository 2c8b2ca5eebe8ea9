"""Vocabulary-parallel cross-entropy (Megatron-LM): each rank looks up a target only if it lies in its slice; otherwise it uses index 0 of its slice and sets the result to 0, so wrong-looking lookups occur on purpose. The maximum is subtracted without gradient, and the sum of exponentials and the target
logit are added over ranks. The full logits are never put together."""
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "labels": "next-token labels, already shifted; -100 = not trained, [rows, time]"}
SETTINGS = {"ranks": "vocabulary slices, 4 (simulated)"}
NOTES = "Cross-entropy, mean over trained tokens of all rows. The vocabulary must be divisible by ranks. The maximum is a constant in the gradient, which does not change the gradient. All parameters are used."


class Tiny(nn.Module):
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 32, (3, 9))
    labels = torch.cat([ids[:, 1:], torch.full((3, 1), -100)], 1)
    labels[torch.rand(3, 9) < 0.3] = -100
    return {"model": Tiny(), "ids": ids, "labels": labels}


def right(model, batch, ranks=4):
    hidden = model.rnn(model.emb(batch["ids"]))[0]
    weights, biases = model.head.weight.chunk(ranks), model.head.bias.chunk(ranks)
    local = [F.linear(hidden, w, b) for w, b in zip(weights, biases)]          # one slice per rank
    size = weights[0].shape[0]
    biggest = torch.stack([x.detach().max(-1).values for x in local]).max(0).values
    keep = batch["labels"] != -100
    denominator, picked = 0.0, 0.0
    for r, x in enumerate(local):
        x = x - biggest[..., None]
        target = batch["labels"] - r * size
        outside = (target < 0) | (target >= size)
        target = target.masked_fill(outside, 0)
        picked = picked + x.gather(-1, target[..., None]).squeeze(-1).masked_fill(outside, 0.0)
        denominator = denominator + x.exp().sum(-1)
    return ((denominator.log() - picked) * keep).sum() / keep.sum()


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss = right(model, d)
    got = torch.autograd.grad(loss, list(model.parameters()))
    plain = F.cross_entropy(model(d["ids"]).flatten(0, 1), d["labels"].flatten())
    want = torch.autograd.grad(plain, list(model.parameters()))
    print("sliced", loss.item(), "plain", plain.item())
    assert abs(loss.item() - plain.item()) < 1e-5 and all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want))
