"""The critic is trained with cross entropy on a histogram, not with a squared error, and its target has two nonzero entries.
Right: categorical value head with two-hot targets on a fixed grid: the target's expected value is the (clipped) return; the value read out is the mean of the softmax. The loss does not go to 0 even for a perfect critic."""
import torch
import torch.nn as nn

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "returns": "return to go at each position, [rows, time]", "loss_mask": "1 on answer tokens, [rows, time]"}
SETTINGS = {"low": "smallest value of the grid, -1.0", "high": "largest, 1.0"}
NOTES = "Value loss: cross entropy between the softmax over bins and the two-hot target, mean over masked-in positions of all rows; no shift (value at position t goes with the return at t). Returns are constants, clipped to the grid."


class Critic(nn.Module):
    def __init__(self, V=30, D=12, bins=21):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(V, D), nn.GRU(D, D, batch_first=True), nn.Linear(D, bins)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def two_hot(y, low, high, bins):
    x = (y.clamp(low, high) - low) / (high - low) * (bins - 1)
    i = x.floor().long().clamp(max=bins - 2)
    w = x - i
    t = torch.zeros(*y.shape, bins)
    t.scatter_(-1, i[..., None], (1 - w)[..., None])
    return t.scatter_add(-1, (i + 1)[..., None], w[..., None])


def right(model, batch, low=-1.0, high=1.0):
    lg = model(batch["ids"])
    bins = lg.shape[-1]
    t = two_hot(batch["returns"], low, high, bins)
    ce = -(t * lg.log_softmax(-1)).sum(-1)
    m = batch["loss_mask"]
    value = (lg.detach().softmax(-1) * torch.linspace(low, high, bins)).sum(-1)
    err = ((value - batch["returns"]).abs() * m).sum() / m.sum()
    return (ce * m).sum() / m.sum(), {"value_error": float(err)}


def make(seed):
    torch.manual_seed(seed)
    return {"model": Critic(), "ids": torch.randint(0, 30, (3, 8)), "returns": torch.rand(3, 8) * 2.4 - 1.2, "loss_mask": (torch.rand(3, 8) < 0.7).float()}


if __name__ == "__main__":
    x = make(0)
    m = x.pop("model")
    y = x["returns"]
    t = two_hot(y, -1.0, 1.0, 21)
    assert torch.allclose(t.sum(-1), torch.ones(3, 8), atol=1e-5) and torch.allclose((t * torch.linspace(-1, 1, 21)).sum(-1), y.clamp(-1, 1), atol=1e-5)
    loss, met = right(m, x)
    lg, tot, n = m(x["ids"]).log_softmax(-1), 0.0, 0
    for r in range(3):
        for k in range(8):
            if x["loss_mask"][r, k]:
                tot -= sum(t[r, k, j].item() * lg[r, k, j].item() for j in range(21))
                n += 1
    opt = torch.optim.Adam(m.parameters(), lr=0.05)
    for _ in range(150):
        opt.zero_grad()
        v, last = right(m, x)
        v.backward()
        opt.step()
    print("loss", loss.item(), "explicit loop", tot / n, "value error before", met["value_error"], "after", last["value_error"], "loss after", v.item())
    assert abs(loss.item() - tot / n) < 1e-4 and last["value_error"] < 0.15
