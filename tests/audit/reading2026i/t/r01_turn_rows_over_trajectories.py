"""A trajectory exploded into one row per turn; the divisor is the number of trajectories. As in step-wise agent training (verl-agent, rLLM) when the history is rewritten between turns.
When the harness drops earlier reasoning from the history, turn k+1 does not extend the tokens of turn k, so each turn is its own row with its own prompt. All rows of a trajectory share its advantage. Tokens are summed within a trajectory and divided by a constant length; the sum over rows is divided by the number of trajectories, which is smaller than the number of rows."""
import torch
import torch.nn as nn
import torch.nn.functional as F
FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "token ids, one row per turn (rewritten history + the turn), [rows, time]", "loss_mask": "1 at tokens that the model wrote in this turn, aligned with ids, [rows, time]",
          "trajectory": "number of the trajectory of each row, [rows]", "advantages": "advantage of the trajectory, repeated on its rows, [rows]"}
SETTINGS = {"norm_length": "constant length that token sums are divided by (Dr. GRPO), 16"}
NOTES = ("REINFORCE with constant-length normalization: sum over the trained tokens of all turns of a trajectory / norm_length, mean over trajectories (not over rows, not over tokens). "
         "A trajectory with more turns weighs more by design. advantages are constants. Number of rows is free. All parameters are used.")

class Tiny(nn.Module):
    def __init__(self, vocab=31, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def make(seed):
    torch.manual_seed(seed)
    traj = torch.tensor([0, 0, 0, 1, 2, 2])
    ids = torch.randint(1, 31, (6, 14)); mask = torch.zeros(6, 14)
    for r in range(6):
        a = int(torch.randint(3, 8, (1,))); n = int(torch.randint(2, 6, (1,))); mask[r, a:a + n] = 1
    adv = torch.randn(3)
    return {"model": Tiny(), "ids": ids, "loss_mask": mask, "trajectory": traj, "advantages": adv[traj]}

def right(model, batch, norm_length=16):
    ids, mask = batch["ids"], batch["loss_mask"][:, 1:]
    lp = torch.log_softmax(model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    per_row = (lp * mask).sum(-1) * batch["advantages"]
    return -per_row.sum() / norm_length / len(batch["trajectory"].unique())

if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    l = right(m, b); l.backward()
    ref = 0.0
    for t in range(3):
        s = 0.0
        for r in range(6):
            if b["trajectory"][r] == t:
                lp = torch.log_softmax(m(b["ids"][r:r + 1]), -1)[0]
                for k in range(1, 14):
                    if b["loss_mask"][r, k]:
                        s = s - b["advantages"][r].item() * lp[k - 1, b["ids"][r, k]].item()
        ref += s / 16 / 3
    g = sum(p.grad.norm() for p in m.parameters()).item()
    print("loss", l.item(), "explicit loop", ref, "grad", g)
    assert abs(l.item() - ref) < 1e-5 and g > 0
