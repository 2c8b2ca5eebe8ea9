"""Right: vocabulary-parallel cross entropy. Every rank holds a slice of the output layer, gathers a target logit even when the target is not in its slice (then index 0, multiplied by 0), and the maximum over ranks is detached. The vocabulary is padded, and the padded logits are cut out by -inf."""
import torch
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token is a trained target, [rows, time]"}
SETTINGS = {"ranks": "tensor-parallel ranks, 4; it divides the padded output rows (32)"}
NOTES = "Next-token cross entropy, mean over trained targets of all rows. The output layer has 32 rows, of which the last 3 are padding of the vocabulary (29 real tokens) and get no gradient. Ranks are simulated by slices."
REAL = 29

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
    ids = torch.randint(0, REAL, (3, 10))
    mask = (torch.rand(3, 10) < 0.7).float()
    mask[:, 1] = 1
    return {"model": Tiny(), "ids": ids, "loss_mask": mask}

def split(made):
    return made["model"], {k: v for k, v in made.items() if k != "model"}
def right(model, batch, ranks=4):
    h = model.hidden(batch["ids"])[:, :-1]
    target, mask = batch["ids"][:, 1:], batch["loss_mask"][:, 1:]
    size = model.head.weight.shape[0] // ranks
    parts = []
    for rank in range(ranks):
        own = slice(rank * size, (rank + 1) * size)
        logits = h @ model.head.weight[own].T + model.head.bias[own]
        real = torch.arange(rank * size, (rank + 1) * size) < REAL
        parts.append(logits.masked_fill(~real, float("-inf")))
    top = torch.stack([p.amax(-1) for p in parts]).amax(0).detach()  # all-reduce max
    total = sum((p - top[..., None]).exp().sum(-1) for p in parts)  # all-reduce sum
    hit = 0.0
    for rank, p in enumerate(parts):
        local = target - rank * size
        mine = (local >= 0) & (local < size)
        picked = p.gather(-1, torch.where(mine, local, 0)[..., None]).squeeze(-1)
        hit = hit + torch.where(mine, picked, 0.0)  # all-reduce sum
    nll = total.log() + top - hit
    return (nll * mask).sum() / mask.sum()

def slow(model, batch):
    logits = model(batch["ids"])[:, :-1, :REAL]
    nll = F.cross_entropy(logits.transpose(1, 2), batch["ids"][:, 1:], reduction="none")
    return (nll * batch["loss_mask"][:, 1:]).sum() / batch["loss_mask"][:, 1:].sum()

def grads(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])
if __name__ == "__main__":
    model, batch = split(make(0))
    a, b = right(model, batch), slow(model, batch)
    print("loss", a.item(), b.item(), "gradient", float(grads(a, model).norm()))
    assert torch.allclose(a, b, atol=1e-5) and torch.allclose(grads(a, model), grads(b, model), atol=1e-5)
