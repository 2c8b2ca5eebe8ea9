"""SigLIP's chunked sigmoid loss: each rank keeps its images and passes the texts round a ring. Only in the first round does a block have positives (its diagonal); in all later rounds every pair is a negative, label -1 everywhere, though the "diagonal" looks like matching pairs. No softmax, so no rank needs the full matrix."""
FAMILY = "sharding"
KIND = "loss"
INPUTS = {"images": "float features, [rows, 12]", "texts": "token ids, [rows, time]; row i belongs to image i"}
SETTINGS = {"world": "ranks, 4"}
NOTES = "Contrastive (sigmoid). Reduction: sum over all rows x rows pairs / number of rows (not / pairs). Rows interact, so the loss of a batch is not the mean of the losses of its parts. Result does not depend on world; number of rows is free (uneven shards allowed). The learned scale is exp(t) and bias b starts at -10. No parameter unused."
import torch
from torch import nn


class Towers(nn.Module):
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.img = nn.Linear(12, width)
        self.txt = nn.EmbeddingBag(vocab, width)
        self.t = nn.Parameter(torch.tensor(10.0).log())
        self.b = nn.Parameter(torch.tensor(-10.0))

    def forward(self, images, texts):
        n = nn.functional.normalize
        return n(self.img(images), dim=-1), n(self.txt(texts), dim=-1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    return {"model": Towers(), "images": torch.randn(8, 12, generator=g), "texts": torch.randint(0, 32, (8, 5), generator=g)}


def right(model, batch, world=4):
    zi, zt = model(batch["images"], batch["texts"])
    I, X = torch.tensor_split(zi, world), torch.tensor_split(zt, world)
    total = 0.0
    for rank in range(world):
        for hop in range(world):
            logits = I[rank] @ X[(rank + hop) % world].T * model.t.exp() + model.b
            sign = -torch.ones_like(logits)
            if hop == 0:
                sign = sign + 2 * torch.eye(len(logits))
            total = total - nn.functional.logsigmoid(sign * logits).sum()
    return total / len(zi)


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    loss = right(m, b)
    gs = torch.autograd.grad(loss, list(m.parameters()))
    zi, zt = m(b["images"], b["texts"])
    ref = 0.0
    for i in range(8):
        for j in range(8):
            z = 1.0 if i == j else -1.0
            ref = ref - nn.functional.logsigmoid(z * (m.t.exp() * (zi[i] @ zt[j]) + m.b))
    ref = ref / 8
    gr = torch.autograd.grad(ref, list(m.parameters()))
    gap = max((x - y).abs().max().item() for x, y in zip(gs, gr))
    print(loss.item(), ref.item(), right(m, b, world=3).item(), "grad", sum(x.norm() for x in gs).item(), "gap", gap)
    assert torch.allclose(loss, ref, atol=1e-4) and torch.allclose(right(m, b, world=3), ref, atol=1e-4) and gap < 1e-4
