"""Replicated q-norm weights keep each tensor-parallel rank's partial gradient. NVIDIA-NeMo/RL#3716,
https://github.com/NVIDIA-NeMo/RL/issues/3716, 2026. The split train-step path finishes gradients by hand and skips the tensor-parallel sum for replicated
parameters. A rank's raw gradient of the q-norm weight covers its own heads only, so the replicas drift apart step by step without any error."""
import copy
import torch
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "update"
INPUTS = {"batches": "micro-batches: {ids: token ids, [rows, time]}, all of the same shape"}
SETTINGS = {}
NOTES = ("One SGD step on next-token cross entropy, mean over tokens, mean over micro-batches. The model holds one copy of the q-norm weight per tensor-parallel rank (2 "
         "ranks, 2 heads each); the copies start equal and must stay equal. The other parameters are split by head or whole and need no reduction here.")

class Parallel(torch.nn.Module):
    def __init__(self, vocab=32, width=16, heads=4, ranks=2):
        super().__init__()
        self.heads, self.ranks, self.dim = heads, ranks, width // heads
        self.emb = torch.nn.Embedding(vocab, width)
        self.q, self.k, self.v = (torch.nn.Linear(width, width, bias=False) for _ in range(3))
        self.q_norm = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(self.dim)) for _ in range(ranks))
        self.head = torch.nn.Linear(width, vocab)

    def forward(self, ids):
        rows, time = ids.shape
        x = self.emb(ids)
        q, k, v = (f(x).view(rows, time, self.heads, self.dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        per = self.heads // self.ranks
        parts = []
        for rank in range(self.ranks):
            own = slice(rank * per, (rank + 1) * per)
            qn = F.normalize(q[:, own], dim=-1) * self.dim ** 0.5 * self.q_norm[rank]
            see = torch.ones(time, time).tril().bool()
            parts.append((qn @ k[:, own].transpose(2, 3)).masked_fill(~see, float("-inf")).softmax(-1) @ v[:, own])
        return self.head(x + torch.cat(parts, 1).transpose(1, 2).reshape(rows, time, -1))

def make(seed):
    torch.manual_seed(seed)
    return {"model": Parallel(), "batches": [{"ids": torch.randint(0, 32, (3, 9))} for _ in range(2)]}

def accumulate(model, optimizer, batches):
    optimizer.zero_grad()
    for batch in batches:
        logits = model(batch["ids"])[:, :-1]
        (F.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten()) / len(batches)).backward()

def broken(model, optimizer, batches):
    accumulate(model, optimizer, batches)
    optimizer.step()

def right(model, optimizer, batches):
    accumulate(model, optimizer, batches)
    total = sum(p.grad for p in model.q_norm)
    for p in model.q_norm:
        p.grad.copy_(total)
    optimizer.step()

def after(update, made, steps=3):
    model = copy.deepcopy(made["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        update(model, optimizer, made["batches"])
    return model

if __name__ == "__main__":
    made = make(0)
    a, b = after(broken, made), after(right, made)
    gap = lambda m: float((m.q_norm[0] - m.q_norm[1]).abs().max())
    print("largest gap between the two copies after 3 steps: broken", gap(a), "right", gap(b))
    assert gap(a) > 1e-4 and gap(b) == 0.0
    single = copy.deepcopy(made["model"])
    single.q_norm = torch.nn.ParameterList([single.q_norm[0], single.q_norm[0]])  # one shared weight
    optimizer = torch.optim.SGD(single.parameters(), lr=0.5)
    for _ in range(3):
        broken(single, optimizer, made["batches"])
    assert torch.allclose(single.q_norm[0], b.q_norm[0], atol=1e-5)
