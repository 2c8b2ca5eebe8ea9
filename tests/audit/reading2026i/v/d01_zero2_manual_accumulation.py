"""ZeRO-2 keeps only the last micro-batch under manual accumulation. allenai/open-instruct#1498,
https://github.com/allenai/open-instruct/pull/1498, 2026. The trainer accumulated by hand while the engine was configured
with gradient_accumulation_steps=1, so the engine took every backward() for an accumulation boundary. At a boundary
ZeRO-2 copies its accumulator into the averaged gradients and clears it, so only the last backward before step()
survived. The fix marks the boundary by hand before the last backward."""
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "sharding and reductions over ranks"
KIND = "update"
INPUTS = {"model": "tiny language model", "optimizer": "SGD over all its parameters",
          "batches": "list of micro-batches of one optimizer step, each {'ids': [rows, time], 'loss_mask': 1 where the token is trained}"}
SETTINGS = {}
NOTES = ("One optimizer step over all micro-batches: the gradient is the sum of the micro-batches' token losses divided "
         "by the number of trained tokens of all micro-batches. Works with any number of micro-batches.")


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


class Zero2Engine:
    """What the engine does with gradients: after each backward the gradients move to a flat accumulator."""
    def __init__(self, model, optimizer):
        self.params, self.optimizer = [p for p in model.parameters() if p.requires_grad], optimizer
        self.all_grad_tensors, self.averaged_gradients = None, None
        self.boundary_override = None

    def set_gradient_accumulation_boundary(self, is_boundary):
        self.boundary_override = is_boundary

    def is_gradient_accumulation_boundary(self):
        return True if self.boundary_override is None else self.boundary_override   # configured with 1 step

    def backward(self, loss):
        loss.backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.params]
        for p in self.params:
            p.grad = None
        if self.all_grad_tensors is None:
            self.all_grad_tensors = grads
        else:
            self.all_grad_tensors = [a + g for a, g in zip(self.all_grad_tensors, grads)]
        if self.is_gradient_accumulation_boundary():
            self.averaged_gradients = self.all_grad_tensors
            self.all_grad_tensors = None

    def step(self):
        for p, g in zip(self.params, self.averaged_gradients):
            p.grad = g
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.averaged_gradients = None


def token_loss_sum(model, batch):
    logits = model(batch["ids"][:, :-1])
    nll = F.cross_entropy(logits.transpose(1, 2), batch["ids"][:, 1:], reduction="none")
    return (nll * batch["loss_mask"][:, 1:]).sum()


def make(seed):
    torch.manual_seed(seed)
    model = TinyLM()
    batches = [{"ids": torch.randint(0, 32, (2, 10)), "loss_mask": (torch.rand(2, 10) < 0.7).float()} for _ in range(3)]
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": batches}


def broken(model, optimizer, batches):
    engine = Zero2Engine(model, optimizer)
    total = sum(b["loss_mask"][:, 1:].sum() for b in batches)
    for batch in batches:
        engine.backward(token_loss_sum(model, batch) / total)
    engine.step()


def right(model, optimizer, batches):
    engine = Zero2Engine(model, optimizer)
    total = sum(b["loss_mask"][:, 1:].sum() for b in batches)
    for i, batch in enumerate(batches):
        engine.set_gradient_accumulation_boundary(i == len(batches) - 1)
        engine.backward(token_loss_sum(model, batch) / total)
    engine.step()


if __name__ == "__main__":
    a, b, c = make(0), make(0), make(0)
    broken(**a)
    right(**b)
    loss = sum(token_loss_sum(c["model"], m) for m in c["batches"]) / sum(m["loss_mask"][:, 1:].sum() for m in c["batches"])
    loss.backward()
    c["optimizer"].step()
    w = [x["model"].head.weight for x in (a, b, c)]
    print("broken vs one big batch", (w[0] - w[2]).abs().max().item(), " right vs one big batch", (w[1] - w[2]).abs().max().item())
    assert (w[0] - w[2]).abs().max() > 1e-4 and torch.allclose(w[1], w[2], atol=1e-6)
