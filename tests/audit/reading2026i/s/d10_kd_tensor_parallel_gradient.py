"""Distillation loss over a sharded vocabulary has gradients tp_size times too large. NVIDIA-NeMo/Automodel#3776, https://github.com/NVIDIA-NeMo/Automodel/issues/3776, 2026.
The KL terms of the vocabulary shards are added over the tensor-parallel ranks with the differentiable all_reduce, whose backward all-reduces the incoming gradient again. Every rank computes the same loss and calls backward, so
each gradient is counted tp_size times. The loss in the log is exact; only the mix of distillation and cross-entropy is wrong (8 : 1 instead of 1 : 1 at tp = 8). The fix is an all-reduce with identity backward."""
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "labels": "next-token labels, already shifted, -100 = not trained, [rows, time]", "teacher_logits": "frozen teacher's logits, [rows, time, vocab] (constant)"}
SETTINGS = {"kd_ratio": "share of the distillation loss, 0.5", "temperature": "softmax temperature of both sides, 2.0 (loss scaled by its square)", "tp": "number of vocabulary shards, 2"}
NOTES = ("(1 - kd_ratio) * cross-entropy + kd_ratio * T^2 * KL(teacher || student), both mean over trained tokens of all rows. tp simulates tensor-parallel ranks in one process; value and gradient must not depend on tp "
         "(the vocabulary must be divisible by it). All parameters are used.")


class Tiny(nn.Module):
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


class _AllReduceSum(torch.autograd.Function):
    """torch.distributed.nn.functional.all_reduce, seen from one rank: the backward sums the (equal) gradients of all ranks."""
    @staticmethod
    def forward(ctx, shards):                   # [tp, ...]
        ctx.tp = shards.shape[0]
        return shards.sum(0)

    @staticmethod
    def backward(ctx, grad):
        grad = torch.stack([grad] * ctx.tp).sum(0)          # all-reduce over the ranks
        return grad.expand(ctx.tp, *grad.shape)


class _ReduceForward(torch.autograd.Function):
    """All-reduce in the forward, identity in the backward (Megatron's reduce_from_tensor_parallel_region)."""
    @staticmethod
    def forward(ctx, shards):
        ctx.tp = shards.shape[0]
        return shards.sum(0)

    @staticmethod
    def backward(ctx, grad):
        return grad.expand(ctx.tp, *grad.shape)


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 32, (3, 10))
    labels = torch.cat([ids[:, 1:], torch.full((3, 1), -100)], dim=1)
    labels[:, :3] = -100
    return {"model": Tiny(), "ids": ids, "labels": labels, "teacher_logits": torch.randn(3, 10, 32) * 2}


def _loss(model, batch, kd_ratio, temperature, tp, reduce_op):
    logits = model(batch["ids"])
    keep = batch["labels"] != -100
    ce = F.cross_entropy(logits[keep], batch["labels"][keep])
    s = (logits[keep] / temperature).log_softmax(-1)        # normalizer is all-reduced over the shards in the original
    t = (batch["teacher_logits"][keep] / temperature).log_softmax(-1)
    local = torch.stack([(tt.exp() * (tt - ss)).sum(-1) for ss, tt in zip(s.chunk(tp, -1), t.chunk(tp, -1))])
    kl = reduce_op(local).mean() * temperature ** 2
    return (1 - kd_ratio) * ce + kd_ratio * kl


def broken(model, batch, kd_ratio=0.5, temperature=2.0, tp=2):
    return _loss(model, batch, kd_ratio, temperature, tp, _AllReduceSum.apply)


def right(model, batch, kd_ratio=0.5, temperature=2.0, tp=2):
    return _loss(model, batch, kd_ratio, temperature, tp, _ReduceForward.apply)


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    grads = {}
    for f, tp in ((broken, 2), (right, 2), (right, 1)):
        model.zero_grad()
        loss = f(model, d, tp=tp)
        loss.backward()
        grads[f.__name__, tp] = model.head.weight.grad.clone()
        print(f.__name__, "tp", tp, "loss", loss.item(), "grad norm", grads[f.__name__, tp].norm().item())
    assert torch.allclose(grads["right", 2], grads["right", 1], atol=1e-6)
    assert not torch.allclose(grads["broken", 2], grads["right", 2], atol=1e-4)
