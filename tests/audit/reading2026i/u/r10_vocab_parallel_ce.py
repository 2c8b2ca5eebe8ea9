"""Vocabulary-parallel cross-entropy (Megatron-LM). Each tensor-parallel rank holds a slice of the output matrix. Targets outside the slice are replaced by index 0 and their logit is set to zero before a sum over ranks; the maximum is reduced by max and carries no gradient, the sum of exponentials by sum. On a single rank most targets are 'wrong'; only the sum over ranks is the target's logit."""
import math
import torch

FAMILY = "sharding"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time + 1]", "loss_mask": "1 where the target is trained, [rows, time]"}
SETTINGS = {"ranks": "tensor-parallel ranks, 4"}
NOTES = "Next-token cross-entropy, mean over trained targets of all rows. The maximum is detached (it cancels). The vocabulary (32) must be a multiple of ranks. Ranks are simulated in one process."

class TinyLM(torch.nn.Module):
    """One causal attention layer with fixed sinusoidal positions; every parameter is used by every forward."""
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, vocab)

    def hidden(self, ids, positions=None, mask=None):
        b, t = ids.shape
        w = self.emb.embedding_dim
        if positions is None:
            positions = torch.arange(t).expand(b, t)
        if mask is None:
            mask = torch.ones(t, t, dtype=torch.bool).tril().expand(b, t, t)
        freq = torch.exp(-torch.arange(0, w, 2).float() / w * math.log(100.0))
        ang = positions.float().unsqueeze(-1) * freq
        x = self.emb(ids) + torch.cat([ang.sin(), ang.cos()], -1)
        q, k, v = self.qkv(x).chunk(3, -1)
        score = q @ k.transpose(-1, -2) / math.sqrt(w)
        score = score.masked_fill(~mask, -1e9)
        return x + self.out(score.softmax(-1) @ v)

    def forward(self, ids, positions=None, mask=None):
        return self.head(self.hidden(ids, positions, mask))


def make(seed):
    torch.manual_seed(seed)
    return {"model": TinyLM(), "ids": torch.randint(0, 32, (3, 11)), "loss_mask": (torch.rand(3, 10) > 0.3).float()}


def right(model, batch, ranks=4):
    x, y, keep = batch["ids"][:, :-1], batch["ids"][:, 1:], batch["loss_mask"]
    h = model.hidden(x)
    part = model.head.out_features // ranks
    shards = [torch.nn.functional.linear(h, model.head.weight[r * part:(r + 1) * part], model.head.bias[r * part:(r + 1) * part]) for r in range(ranks)]
    top = torch.stack([s.detach().amax(-1) for s in shards]).amax(0)          # all-reduce max
    picked, total = [], []
    for r, s in enumerate(shards):
        s = s - top[..., None]
        outside = (y < r * part) | (y >= (r + 1) * part)
        local = (y - r * part).masked_fill(outside, 0)
        picked.append(s.gather(-1, local[..., None])[..., 0].masked_fill(outside, 0.0))
        total.append(s.exp().sum(-1))
    nll = torch.stack(total).sum(0).log() - torch.stack(picked).sum(0)        # all-reduce sum
    return (nll * keep).sum() / keep.sum()


if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    loss = right(m, b); g1 = torch.autograd.grad(loss, list(m.parameters()))
    nll = torch.nn.functional.cross_entropy(m(b["ids"][:, :-1]).flatten(0, 1), b["ids"][:, 1:].flatten(), reduction="none")
    want = (nll * b["loss_mask"].flatten()).sum() / b["loss_mask"].sum(); g2 = torch.autograd.grad(want, list(m.parameters()))
    print(loss.item(), want.item()); assert abs(loss - want) < 1e-5 and all(torch.allclose(a, c, atol=1e-5) for a, c in zip(g1, g2))
