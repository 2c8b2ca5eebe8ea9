"""PPO's clipped value loss takes the MAXIMUM of the clipped and the unclipped squared error: a value that has already moved further than the clip from its old value towards the return gets no gradient, one that moved away is not clipped. The value of a token is read one
position EARLIER (the state before it was sampled). baselines PPO2, TRL PPOTrainer, verl compute_value_loss."""
import torch
from torch import nn

FAMILY = "distillation and value losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right padded with 0", "response_mask": "1 on sampled tokens, [rows, time], aligned with ids",
          "old_values": "critic's values at rollout time for the state before each of ids[:, 1:], [rows, time-1], constant",
          "returns": "GAE advantage + old value for each of ids[:, 1:], [rows, time-1], constant"}
SETTINGS = {"value_clip": "range around the old value, 0.2", "value_coef": "weight of the value loss, 0.5 (on top of the 1/2 of the square)"}
NOTES = ("Value loss (PPO critic), model returns one value per position, [rows, time, 1]. Reduction: mean over sampled tokens of all rows, times 1/2, times value_coef. Some tokens have no gradient because of the max with the clipped error; by design. "
         "old_values and returns are constants. All parameters are used. Any number of rows.")

class TinyCritic(nn.Module):
    def __init__(self, vocab=32, width=16, outputs=1):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def random_rows(g, rows, time, vocab):
    """Right-padded rows; mask is 1 on the completion (never on position 0, which nothing predicts)."""
    ids, mask = torch.zeros(rows, time, dtype=torch.long), torch.zeros(rows, time)
    for i in range(rows):
        prompt = int(torch.randint(2, 4, (1,), generator=g))
        end = int(torch.randint(prompt + 2, time + 1, (1,), generator=g))
        ids[i, :end] = torch.randint(1, vocab, (end,), generator=g)
        mask[i, prompt:end] = 1.0
    return ids, mask

def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    ids, mask = random_rows(g, 6, 10, 32)
    model = TinyCritic()
    with torch.no_grad():
        old = model(ids).squeeze(-1)[:, :-1] + 0.3 * torch.randn(6, 9, generator=g)
    return {"model": model, "ids": ids, "response_mask": mask, "old_values": old, "returns": old + 0.6 * torch.randn(6, 9, generator=g)}


def right(model, batch, value_clip=0.2, value_coef=0.5):
    mask, old, ret = batch["response_mask"][:, 1:], batch["old_values"], batch["returns"]
    v = model(batch["ids"]).squeeze(-1)[:, :-1]
    v_clip = torch.max(torch.min(v, old + value_clip), old - value_clip)
    worst = torch.max((v - ret) ** 2, (v_clip - ret) ** 2)
    clipfrac = (((v_clip - ret) ** 2 > (v - ret) ** 2) * mask).sum() / mask.sum()
    return value_coef * 0.5 * (worst * mask).sum() / mask.sum(), {"clipfrac": clipfrac.item()}


def grads(loss, model):
    return [g if g is not None else torch.zeros_like(p)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True))]


def close(a, b, tol=1e-5):
    return all(torch.allclose(x, y, rtol=1e-4, atol=tol) for x, y in zip(a, b))

if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss, metrics = right(model, d)
    slow, n, dead = 0.0, 0, 0
    for i in range(6):
        for t in range(1, 10):
            if d["response_mask"][i, t] == 1:
                v, o, r = model(d["ids"][i:i + 1, :t])[0, -1, 0], d["old_values"][i, t - 1].item(), d["returns"][i, t - 1].item()
                c = min(max(v.item(), o - 0.2), o + 0.2)
                if (c - r) ** 2 > (v.item() - r) ** 2:
                    slow, dead = slow + (c - r) ** 2, dead + 1
                else:
                    slow = slow + (v - r) ** 2
                n += 1
    slow = 0.25 * slow / n
    g1, g2 = grads(loss, model), grads(slow, model)
    print("loss", loss.item(), "explicit", slow.item(), "tokens without gradient", dead, "of", n, metrics)
    print("gradient norm", sum((g ** 2).sum() for g in g1).sqrt().item(), "equal", close(g1, g2))
    assert abs(loss.item() - slow.item()) < 1e-6 and close(g1, g2) and dead > 0
