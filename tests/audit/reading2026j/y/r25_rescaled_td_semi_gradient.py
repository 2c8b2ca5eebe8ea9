"""TD(0) in a squashed value space: the critic predicts h(value); the bootstrap is un-squashed by h^-1, the RAW reward is added, and the sum is squashed again, so reward and prediction are on different scales. The next value comes from the same forward pass, detached (semi-gradient),
and rows cut by the time limit bootstrap while terminated rows do not. Pohlen et al. 2018, R2D2 (Kapturowski et al. 2019)."""
import torch
from torch import nn

FAMILY = "distillation and value losses"
KIND = "loss"
INPUTS = {"ids": "states as a token sequence s_0 ... s_T, [rows, T + 1]; prefix t is state t; right padded with 0",
          "rewards": "reward of step t, from state t to state t + 1, unscaled (may be in the hundreds), [rows, T], constant",
          "terminated": "1 at the step that truly ended the episode, [rows, T], constant; a row cut by the time limit has none",
          "step_mask": "1 for real steps, [rows, T]"}
SETTINGS = {"gamma": "discount, 0.99", "eps": "linear part of the squashing function, 1e-3; it divides in the inverse, so > 0"}
NOTES = ("Value loss, semi-gradient TD(0): the target is detached although it comes from the same model in the same forward pass (no target network). Model gives one squashed value per position, [rows, T + 1, 1]. "
         "Reduction: half the squared error, mean over real steps of all rows. rewards, terminated are constants. The gradient is deliberately not the gradient of the full expression. All parameters are used. Any number of rows.")

class TinyCritic(nn.Module):
    def __init__(self, vocab=32, width=16, outputs=1):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    rows, T = 6, 8
    ids, mask, term = torch.zeros(rows, T + 1, dtype=torch.long), torch.zeros(rows, T), torch.zeros(rows, T)
    for i in range(rows):
        n = int(torch.randint(3, T + 1, (1,), generator=g))                 # steps
        ids[i, :n + 1] = torch.randint(1, 32, (n + 1,), generator=g)
        mask[i, :n] = 1.0
        if i % 2 == 0:
            term[i, n - 1] = 1.0                                            # the odd rows were cut by the time limit
    return {"model": TinyCritic(), "ids": ids, "rewards": 20.0 * torch.randn(rows, T, generator=g) * mask, "terminated": term, "step_mask": mask}


def squash(x, eps):
    return torch.sign(x) * (torch.sqrt(x.abs() + 1) - 1) + eps * x


def unsquash(y, eps):
    return torch.sign(y) * (((torch.sqrt(1 + 4 * eps * (y.abs() + 1 + eps)) - 1) / (2 * eps)) ** 2 - 1)


def right(model, batch, gamma=0.99, eps=1e-3):
    v, mask = model(batch["ids"]).squeeze(-1), batch["step_mask"]
    next_raw = unsquash(v[:, 1:].detach(), eps)
    target = squash(batch["rewards"] + gamma * (1 - batch["terminated"]) * next_raw, eps)
    return (0.5 * (v[:, :-1] - target) ** 2 * mask).sum() / mask.sum(), {"target_mean": ((target * mask).sum() / mask.sum()).item()}


def grads(loss, model):
    return [g if g is not None else torch.zeros_like(p)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True))]


def close(a, b, tol=1e-5):
    return all(torch.allclose(x, y, rtol=1e-4, atol=tol) for x, y in zip(a, b))

if __name__ == "__main__":
    import math
    d = make(0)
    model = d.pop("model")
    loss, metrics = right(model, d)
    h = lambda x: math.copysign(math.sqrt(abs(x) + 1) - 1, x) + 1e-3 * x

    def inverse(y):                                                         # by bisection, not by the closed form
        lo, hi = -1e4, 1e4
        for _ in range(200):
            mid = (lo + hi) / 2
            lo, hi = (mid, hi) if h(mid) < y else (lo, mid)
        return (lo + hi) / 2

    slow, n = 0.0, 0
    for i in range(6):
        for t in range(8):
            if d["step_mask"][i, t] == 1:
                v = model(d["ids"][i:i + 1, :t + 1])[0, -1, 0]
                nxt = 0.0 if d["terminated"][i, t] else inverse(model(d["ids"][i:i + 1, :t + 2])[0, -1, 0].item())
                slow, n = slow + 0.5 * (v - h(d["rewards"][i, t].item() + 0.99 * nxt)) ** 2, n + 1
    g1, g2 = grads(loss, model), grads(slow / n, model)
    print("loss", loss.item(), "explicit", (slow / n).item(), metrics, "h^-1(h(100)) =", unsquash(squash(torch.tensor(100.0), 1e-3), 1e-3).item())
    print("gradient norm", sum((g ** 2).sum() for g in g1).sqrt().item(), "equal", close(g1, g2, 1e-3))
    assert abs(loss.item() - (slow / n).item()) < 1e-3 and close(g1, g2, 1e-3)
