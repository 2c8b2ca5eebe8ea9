"""Rows weigh by trajectory and not by row. In step-wise agent training each turn is a row of its own (SkyRL step-wise,
rLLM, verl-agent), so a trajectory has as many rows as turns. To keep the weight of a trajectory independent of its number
of turns, every token is divided by the trained tokens of its whole trajectory (all its rows), and the sum by the number
of trajectories. The loss is neither a mean over tokens nor over rows."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "one turn per row, [rows, time]", "loss_mask": "1 where the policy wrote the token, [rows, time]",
          "trajectory": "index 0 ... n-1 of the trajectory of each row, [rows]",
          "advantages": "advantage of the trajectory, repeated for each of its rows, [rows]"}
SETTINGS = {}
NOTES = ("REINFORCE, on-policy. Reduction: mean over the trained tokens of a trajectory (over all its rows), then mean over "
         "trajectories. advantages are constants. All rows of a trajectory must be in the same batch. All parameters "
         "used.")


class TinyLM(nn.Module):
    """One attention layer; `positions` [rows, time], `allowed` bool [rows, time, time] (default: causal)."""

    def __init__(self, vocab=32, width=16, max_pos=96):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions=None, allowed=None):
        t = ids.shape[1]
        if positions is None:
            positions = torch.arange(t).expand(ids.shape)
        if allowed is None:
            allowed = torch.ones(t, t, dtype=torch.bool).tril()
        x = self.tok(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        s = (q @ k.transpose(-1, -2) / x.shape[-1] ** 0.5).masked_fill(~allowed, -1e9)
        return self.head(F.gelu(x + self.out(s.softmax(-1) @ v)))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    turns = torch.tensor([1, 4, 2, 3])
    traj = torch.repeat_interleave(torch.arange(4), turns)
    ids = torch.randint(1, 32, (10, 9), generator=g)
    start = torch.randint(2, 5, (10, 1), generator=g)
    end = start + torch.randint(1, 5, (10, 1), generator=g)
    pos = torch.arange(9)[None]
    mask = ((pos >= start) & (pos < end)).float()
    return {"model": TinyLM(), "ids": ids, "loss_mask": mask, "trajectory": traj,
            "advantages": torch.randn(4, generator=g)[traj]}


def right(model, batch):
    ids, mask, traj = batch["ids"], batch["loss_mask"][:, 1:], batch["trajectory"]
    logp = -F.cross_entropy(model(ids)[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    n = int(traj.max()) + 1
    tokens = torch.zeros(n).index_add_(0, traj, mask.sum(1))
    weight = mask / tokens[traj][:, None] / n
    return -(weight * batch["advantages"][:, None] * logp).sum()


if __name__ == "__main__":
    c = make(0)
    m = c.pop("model")
    loss = right(m, c)
    per = []
    for k in range(4):
        terms = []
        for i in (c["trajectory"] == k).nonzero()[:, 0].tolist():
            lp = m(c["ids"][i:i + 1])[0].log_softmax(-1)
            terms += [-c["advantages"][i] * lp[t - 1, c["ids"][i, t]] for t in range(1, 9) if c["loss_mask"][i, t]]
        per.append(sum(terms) / len(terms))
    ref = sum(per) / 4
    loss.backward()
    print("loss", loss.item(), "loop", ref.item(), "grad", sum(p.grad.abs().sum().item() for p in m.parameters()))
    assert abs(loss - ref) < 1e-5 and all(p.grad.abs().sum() > 0 for p in m.parameters())
