"""Local loss multiplied by the number of ranks, since DDP averages the gradients. transformers Trainer with average_tokens_across_devices, TRL, verl.
Each rank divides its sum by the token count of ALL ranks and all micro-batches; the averaging of DDP would then divide by the world size once more, so the loss is multiplied by it before backward. The number of micro-batches does not divide anything."""
import torch
from torch import nn
FAMILY = "sharding"
KIND = "update"
INPUTS = {"batches": "list over ranks of lists over micro-batches of dicts with ids [rows, time] and labels (unshifted, -100 where not trained)"}
SETTINGS = {}
NOTES = "One optimizer step. The gradient is that of the mean cross entropy over all trained tokens of all ranks and micro-batches; ranks and micro-batches hold unequal numbers of trained tokens. The mean over ranks (what DDP does) is simulated by accumulating p.grad / world. Any number of ranks and micro-batches."


class TinyLM(nn.Module):
    def __init__(self, vocab=32, width=16, max_pos=64):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, position_ids=None, doc_ids=None):
        n, t = ids.shape
        if position_ids is None:
            position_ids = torch.arange(t).expand(n, t)
        x = self.emb(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        allow = torch.ones(t, t, dtype=torch.bool).tril().expand(n, t, t)
        if doc_ids is not None:
            allow = allow & (doc_ids[:, :, None] == doc_ids[:, None, :])
        score = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        att = score.masked_fill(~allow, float("-inf")).softmax(-1)
        return self.head(torch.tanh(x + self.mix(att @ v)))


def make(seed):
    torch.manual_seed(seed)
    model = TinyLM()
    batches = []
    for r in range(2):
        mbs = []
        for k in range(3):
            ids = torch.randint(0, 32, (2, 8))
            labels = ids.clone()
            labels[:, :1 + (2 * r + k) % 5] = -100
            mbs.append({"ids": ids, "labels": labels})
        batches.append(mbs)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "batches": batches}


def right(model, optimizer, batches):
    world = len(batches)
    count = sum((b["labels"][:, 1:] != -100).sum() for mbs in batches for b in mbs)      # all_reduce(SUM)
    grads = [torch.zeros_like(p) for p in model.parameters()]
    for mbs in batches:                                     # one rank after another
        model.zero_grad()
        for b in mbs:
            s = nn.functional.cross_entropy(model(b["ids"])[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum")
            (s / count * world).backward()
        for g, p in zip(grads, model.parameters()):
            g += p.grad / world                             # DDP's mean
    for g, p in zip(grads, model.parameters()):
        p.grad = g
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    import copy
    d = make(0)
    ref = copy.deepcopy(d["model"])
    right(**d)
    flat = [b for m in d["batches"] for b in m]
    ids, lab = torch.cat([b["ids"] for b in flat]), torch.cat([b["labels"] for b in flat])
    o = torch.optim.SGD(ref.parameters(), lr=0.1)
    nn.functional.cross_entropy(ref(ids)[:, :-1].flatten(0, 1), lab[:, 1:].flatten(), ignore_index=-100).backward()
    moved = ref.head.weight.grad.norm().item()
    o.step()
    diff = max((a - b).abs().max().item() for a, b in zip(d["model"].parameters(), ref.parameters()))
    print("largest parameter difference to one big batch", diff, "gradient", moved)
    assert diff < 1e-6 < moved
