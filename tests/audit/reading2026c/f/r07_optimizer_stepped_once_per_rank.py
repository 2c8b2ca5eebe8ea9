"""Right: optimizer.step() runs once per rank in every update, each time with most gradients set to None. This is ZeRO-1 in one process: gradients are averaged over ranks, every parameter has one owner, and an owner's step touches only its parameters."""
import copy
import torch
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "update"
INPUTS = {"batches": "one batch per rank: {ids: token ids, [rows, time]}, equal shapes"}
SETTINGS = {}
NOTES = ("Next-token cross entropy, mean over tokens of all ranks; one update of the given optimizer. Parameter i belongs to rank i modulo the number of ranks. Needs an optimizer that skips parameters without gradient and keeps its "
         "state per parameter (SGD, Adam, AdamW of torch). Any number of ranks; the result does not depend on it for the same rows.")

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
    return {"model": Tiny(), "batches": [{"ids": torch.randint(0, 32, (2, 9))} for _ in range(3)]}

def loss_of(model, batch):
    return F.cross_entropy(model(batch["ids"])[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())

def right(model, optimizer, batches):
    params = list(model.parameters())
    per_rank = [torch.autograd.grad(loss_of(model, batch), params) for batch in batches]
    mean = [sum(g) / len(batches) for g in zip(*per_rank)]
    for rank in range(len(batches)):
        for i, (p, g) in enumerate(zip(params, mean)):
            p.grad = g if i % len(batches) == rank else None
        optimizer.step()
    optimizer.zero_grad()

def slow(model, optimizer, batches):
    ids = torch.cat([b["ids"] for b in batches])
    optimizer.zero_grad()
    loss_of(model, {"ids": ids}).backward()
    optimizer.step()

def after(update, made, steps=3):
    model = copy.deepcopy(made["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-4)
    for _ in range(steps):
        update(model, optimizer, made["batches"])
    return torch.cat([p.detach().flatten() for p in model.parameters()])

if __name__ == "__main__":
    made = make(0)
    start = torch.cat([p.detach().flatten() for p in made["model"].parameters()])
    a, b = after(right, made), after(slow, made)
    print("moved", float((a - start).norm()), "difference to the plain update", float((a - b).norm()))
    assert torch.allclose(a, b, atol=1e-4) and (a - start).norm() > 0.1
