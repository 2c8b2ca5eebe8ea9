"""Agent turns are separate rows, and rows carry very different weights: each trajectory counts once, whatever its number of turns or tokens.
Right: the author wants the mean over trajectories of the mean over all trained tokens of the trajectory; rows of one trajectory share a denominator and are not adjacent in the batch."""
import torch
import torch.nn as nn

FAMILY = "agents"
KIND = "loss"
INPUTS = {
    "ids": "token ids of one turn with its context, [rows, time]", "loss_mask": "1 where the token is trained, [rows, time]",
    "trajectory": "index of the trajectory of each row, [rows]", "advantages": "one advantage for each row, equal in a trajectory, [rows]",
}
SETTINGS = {}
NOTES = "Policy gradient without ratio, -advantage * log p; token mean inside a trajectory (over all its rows), then mean over trajectories. Advantages are constants."


class LM(nn.Module):
    def __init__(self, V=30, D=12):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(V, D), nn.GRU(D, D, batch_first=True), nn.Linear(D, V)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def right(model, batch):
    ids, m = batch["ids"], batch["loss_mask"][:, 1:]
    lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    n = int(batch["trajectory"].max()) + 1
    tokens = torch.zeros(n).index_add(0, batch["trajectory"], m.sum(-1))
    weight = 1.0 / (tokens[batch["trajectory"]].clamp(min=1) * (tokens > 0).sum())
    return -(lp * m * (batch["advantages"] * weight)[:, None]).sum()


def make(seed):
    torch.manual_seed(seed)
    traj = torch.tensor([0, 1, 0, 2, 2, 2, 1, 2])
    ids = torch.randint(0, 30, (8, 12))
    start = torch.randint(2, 9, (8, 1))
    pos = torch.arange(12)[None]
    return {"model": LM(), "ids": ids, "loss_mask": ((pos >= start) & (pos < start + 3)).float(), "trajectory": traj,
            "advantages": torch.randn(3)[traj]}


if __name__ == "__main__":
    x = make(0)
    m = x.pop("model")
    loss = right(m, x)
    loss.backward()
    lp = m(x["ids"]).log_softmax(-1)
    per = []
    for k in range(3):
        tot, n = 0.0, 0
        for r in range(8):
            if int(x["trajectory"][r]) == k:
                for t in range(1, 12):
                    if x["loss_mask"][r, t]:
                        tot += -(x["advantages"][r] * lp[r, t - 1, x["ids"][r, t]]).item()
                        n += 1
        per.append(tot / n)
    print("loss", loss.item(), "explicit loop", sum(per) / 3, "gradient norm", sum(p.grad.norm() ** 2 for p in m.parameters()).sqrt().item())
    assert abs(loss.item() - sum(per) / 3) < 1e-5
