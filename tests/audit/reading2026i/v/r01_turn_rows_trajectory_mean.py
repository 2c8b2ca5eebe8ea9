"""One training row per turn, mean per trajectory. When a chat template drops earlier reasoning from the history, the tokens
of a multi-turn rollout are no prefix of one another, so agent trainers (verl's per-turn agent loops, rLLM, prime-rl)
emit one row per turn. The row's loss is then weighted so that each trajectory counts once, however many rows it has."""
import torch
from torch import nn

FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "one turn per row: its own history, then the turn's answer [rows, time]", "loss_mask": "1 on the answer's tokens of this turn [rows, time]",
          "trajectory": "index of the rollout the row belongs to [rows]", "advantages": "advantage of the rollout, the same on all its rows, constant [rows]"}
SETTINGS = {}
NOTES = ("REINFORCE. Token sum over all rows of a trajectory, divided by the trajectory's trained tokens (over all its "
         "rows), then mean over trajectories. Rows have unequal weights on purpose; a row's weight depends on the "
         "other rows of its trajectory, so all rows of a trajectory must be in the batch. Advantages are constants.")


class TinyLM(nn.Module):
    """Embedding with learned positions, one attention layer, head."""
    def __init__(self, vocab=32, width=16, max_pos=64):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out, self.head = nn.Linear(width, width), nn.Linear(width, vocab)

    def forward(self, ids, positions=None, mask=None):
        rows, time = ids.shape
        if positions is None:
            positions = torch.arange(time).expand(rows, time)
        if mask is None:
            mask = torch.ones(time, time, dtype=torch.bool).tril()
        x = self.tok(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.head(x + self.out(weights @ v))


def make(seed):
    torch.manual_seed(seed)
    trajectory = torch.tensor([0, 0, 0, 1, 2, 2])
    rows, time = len(trajectory), 14
    mask = torch.zeros(rows, time)
    for i in range(rows):
        start = int(torch.randint(3, 9, ()))
        mask[i, start:start + int(torch.randint(2, 6, ()))] = 1
    return {"model": TinyLM(), "batch": {"ids": torch.randint(0, 32, (rows, time)), "loss_mask": mask, "trajectory": trajectory,
                                         "advantages": torch.randn(3)[trajectory]}}


def right(model, batch):
    ids, mask, traj = batch["ids"], batch["loss_mask"][:, 1:], batch["trajectory"]
    logp = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    n = int(traj.max()) + 1
    tokens = torch.zeros(n).index_add(0, traj, mask.sum(1))
    weight = mask / tokens[traj][:, None] / n
    return -(logp * batch["advantages"][:, None] * weight).sum()


if __name__ == "__main__":
    d = make(0)
    loss = right(**d)
    loss.backward()
    b, m = d["batch"], d["model"]
    per = []
    for t in range(3):
        values = []
        for i in range(len(b["ids"])):
            if b["trajectory"][i] == t:
                lp = m(b["ids"][i:i + 1, :-1]).log_softmax(-1)[0]
                values += [-lp[k - 1, b["ids"][i, k]] * b["advantages"][i] for k in range(1, 14) if b["loss_mask"][i, k]]
        per.append(sum(values) / len(values))
    slow = sum(per) / 3
    print(loss.item(), slow.item(), m.head.weight.grad.norm().item())
    assert torch.allclose(loss, slow, atol=1e-5) and m.head.weight.grad.norm() > 0
