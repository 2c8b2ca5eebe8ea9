"""Right: DiLoCo. Each worker trains a copy for several inner steps; the outer optimizer then gets old weights minus the mean of the workers' weights as its gradient and runs with learning rate 0.7 and Nesterov momentum. No loss.backward() on the model itself, and the gradients are written by hand."""
import copy
import torch
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "update"
INPUTS = {"batches": "per worker a list of inner batches {ids: token ids, [rows, time]}"}
SETTINGS = {"inner_lr": "rate of the workers' SGD, 0.1"}
NOTES = "One outer round. The optimizer passed in is the outer one. Workers start from the same weights and do not exchange gradients inside the round. Inner loss: next-token cross entropy, mean over tokens. With one worker, outer SGD without momentum at rate 1 the round equals plain inner SGD."

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
    return {"model": Tiny(), "batches": [[{"ids": torch.randint(0, 32, (2, 9))} for _ in range(4)] for _ in range(3)]}

def inner(model, batches, lr):
    worker = copy.deepcopy(model)
    optimizer = torch.optim.SGD(worker.parameters(), lr=lr)
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(worker(batch["ids"])[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten()).backward()
        optimizer.step()
    return [p.detach() for p in worker.parameters()]

def right(model, optimizer, batches, inner_lr=0.1):
    ends = [inner(model, own, inner_lr) for own in batches]
    for p, *worker in zip(model.parameters(), *ends):
        p.grad = p.detach() - sum(worker) / len(worker)
    optimizer.step()
    optimizer.zero_grad()

def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])

if __name__ == "__main__":
    made = make(0)
    plain = copy.deepcopy(made["model"])
    right(plain, torch.optim.SGD(plain.parameters(), lr=1.0), made["batches"][:1])
    target = torch.cat([p.flatten() for p in inner(made["model"], made["batches"][0], 0.1)])
    print("one worker, outer rate 1: difference to plain SGD", float((flat(plain) - target).abs().max()))
    assert torch.allclose(flat(plain), target, atol=1e-5)
    model = copy.deepcopy(made["model"])
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    before, losses = flat(model), []
    ids = torch.cat([b["ids"] for own in made["batches"] for b in own])
    for _ in range(4):
        losses.append(F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item())
        right(model, outer, made["batches"])
    mean = sum(torch.cat([p.flatten() for p in inner(made["model"], own, 0.1)]) for own in made["batches"]) / 3
    print("losses before each round", losses)
    assert losses[-1] < losses[0] and (flat(model) - before).norm() > 0.1
    first = copy.deepcopy(made["model"])
    right(first, torch.optim.SGD(first.parameters(), lr=0.7, momentum=0.9, nesterov=True), made["batches"])
    assert torch.allclose(flat(first), before + 0.7 * 1.9 * (mean - before), atol=1e-5)
