"""Quantile-Huber value loss (QR-DQN / IQN): EVERY predicted quantile is compared with EVERY target quantile (a broadcast [N, N'] that looks like a shape bug), weighted |tau - 1(target < prediction)|, averaged over targets and SUMMED over predictions. Dabney et al. 2018,
stable-baselines3-contrib quantile_huber_loss with sum_over_quantiles."""
import torch
from torch import nn

FAMILY = "distillation and value losses"
KIND = "loss"
INPUTS = {"ids": "token ids of the states, [rows, time]; the value is read at position last", "last": "index of the state's last real token, [rows]",
          "reward": "reward after the state, [rows], constant", "terminated": "1 if the episode ends there, [rows], constant",
          "next_quantiles": "quantiles of the next state's value from the target network, [rows, 7], any order, constant; their number differs from the model's 5"}
SETTINGS = {"gamma": "discount, 0.95", "kappa": "Huber threshold, 1.0; the Huber term is divided by it"}
NOTES = ("Distributional value loss. The model gives 5 quantiles per position, [rows, time, 5]; tau are the midpoints (i + 0.5) / 5. Reduction: mean over the 7 target quantiles, sum over the 5 predicted ones, mean over rows. "
         "The indicator is not differentiated. reward, terminated, next_quantiles are constants. kappa must be > 0. All parameters are used. Any number of rows.")

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
    ids, last = torch.zeros(8, 6, dtype=torch.long), torch.randint(1, 6, (8,), generator=g)
    for i in range(8):
        ids[i, :int(last[i]) + 1] = torch.randint(1, 32, (int(last[i]) + 1,), generator=g)
    return {"model": TinyCritic(outputs=5), "ids": ids, "last": last, "reward": torch.randn(8, generator=g), "terminated": torch.tensor([0.0, 0, 1, 0, 0, 1, 0, 0]),
            "next_quantiles": 1.5 * torch.randn(8, 7, generator=g)}


def right(model, batch, gamma=0.95, kappa=1.0):
    rows = torch.arange(len(batch["last"]))
    q = model(batch["ids"])[rows, batch["last"]]                                            # [rows, 5]
    target = batch["reward"][:, None] + gamma * (1 - batch["terminated"][:, None]) * batch["next_quantiles"]
    tau = (torch.arange(q.shape[1], dtype=q.dtype) + 0.5) / q.shape[1]
    delta = target[:, None, :] - q[:, :, None]                                              # [rows, 5, 7]
    huber = torch.where(delta.abs() <= kappa, 0.5 * delta ** 2, kappa * (delta.abs() - 0.5 * kappa))
    weight = (tau[None, :, None] - (delta.detach() < 0).to(q.dtype)).abs()
    return (weight * huber / kappa).mean(2).sum(1).mean()


def grads(loss, model):
    return [g if g is not None else torch.zeros_like(p)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True))]


def close(a, b, tol=1e-5):
    return all(torch.allclose(x, y, rtol=1e-4, atol=tol) for x, y in zip(a, b))

if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss, slow = right(model, d), 0.0
    for b in range(8):
        q = model(d["ids"][b:b + 1, :int(d["last"][b]) + 1])[0, -1]
        for i in range(5):
            for j in range(7):
                y = d["reward"][b].item() + (0.0 if d["terminated"][b] else 0.95 * d["next_quantiles"][b, j].item())
                u = y - q[i]
                h = 0.5 * u ** 2 if abs(u.item()) <= 1 else abs(u) - 0.5
                tau = (i + 0.5) / 5
                slow = slow + ((1 - tau) if u.item() < 0 else tau) * h / 7 / 8
    g1, g2 = grads(loss, model), grads(slow, model)
    print("loss", loss.item(), "explicit", slow.item(), "gradient norm", sum((g ** 2).sum() for g in g1).sqrt().item(), "equal", close(g1, g2))
    assert abs(loss.item() - slow.item()) < 1e-5 and close(g1, g2)
