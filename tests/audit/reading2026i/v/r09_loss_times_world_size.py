"""The loss is multiplied by the number of ranks. DDP and FSDP average gradients over ranks. With a global token count as
denominator (transformers' num_items_in_batch with average_tokens_across_devices, TRL, torchtune) each rank's loss is
multiplied by the world size, so that the average gives the gradient of the global token mean."""
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "sharding and reductions over ranks"
KIND = "update"
INPUTS = {"model": "tiny language model", "optimizer": "SGD", "batches": "one list of micro-batches per rank: batches[rank][k] = {'ids', 'loss_mask'}; ranks and micro-batches hold unequal numbers of trained tokens"}
SETTINGS = {}
NOTES = ("One optimizer step; ranks simulated in one process; the gradient average over ranks is explicit. Equals the mean "
         "cross-entropy over all trained tokens of all ranks and micro-batches. Any number of ranks.")


class TinyLM(nn.Module):
    """Embedding with learned positions, one attention layer, head."""
    def __init__(self, vocab=32, width=16, max_pos=64):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out, self.head = nn.Linear(width, width), nn.Linear(width, vocab)

    def forward(self, ids, positions=None, mask=None):
        rows, time = ids.shape
        if positions is None:
            positions = torch.arange(time).expand(rows, time)
        if mask is None:
            mask = torch.ones(time, time, dtype=torch.bool).tril()
        x = self.tok(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.head(x + self.out(weights @ v))


def make(seed):
    torch.manual_seed(seed)
    model = TinyLM()
    batches = [[{"ids": torch.randint(0, 32, (2, 10)), "loss_mask": (torch.rand(2, 10) < p).float()} for p in (0.9, 0.4)] for _ in range(3)]
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": batches}


def nll_sum(model, b):
    nll = F.cross_entropy(model(b["ids"][:, :-1]).transpose(1, 2), b["ids"][:, 1:], reduction="none")
    return (nll * b["loss_mask"][:, 1:]).sum()


def right(model, optimizer, batches):
    world = len(batches)
    num_items = sum(b["loss_mask"][:, 1:].sum() for micro in batches for b in micro)     # all-reduced before the step
    params = list(model.parameters())
    reduced = [torch.zeros_like(p) for p in params]
    for rank in range(world):
        for p in params:
            p.grad = None
        for b in batches[rank]:
            (nll_sum(model, b) / num_items * world).backward()
        for r, p in zip(reduced, params):
            r += p.grad / world                                                          # DDP's average
    for r, p in zip(reduced, params):
        p.grad = r
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    a, b = make(0), make(0)
    before = a["model"].head.weight.clone()
    right(**a)
    flat = [m for r in b["batches"] for m in r]
    (sum(nll_sum(b["model"], m) for m in flat) / sum(m["loss_mask"][:, 1:].sum() for m in flat)).backward()
    b["optimizer"].step()
    diff = max((p - q).abs().max().item() for p, q in zip(a["model"].parameters(), b["model"].parameters()))
    print("moved", (a["model"].head.weight - before).norm().item(), "difference to one process", diff)
    assert diff < 1e-6 and not torch.equal(before, a["model"].head.weight)
