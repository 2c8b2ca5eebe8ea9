"""Void-turn filtering of SimpleTIR (arXiv 2509.02479): a trajectory with a turn that holds neither a complete code block nor an answer is taken out of the policy loss,
but its reward stays in the group statistics. So the advantages of the kept rows do not sum to zero, whole rows of trained-looking tokens get no gradient, and a batch
of void trajectories only has loss 0."""
FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "action_mask": "1.0 on tokens that the model sampled (not prompt, not tool results, not padding), [rows, time]; column 0 is always 0",
          "rewards": "reward of the trajectory, [rows]", "groups": "prompt id of the row, [rows]", "void": "1 if the trajectory holds a void turn, [rows]"}
SETTINGS = {"eps": "added to the standard deviation, 1e-6"}
NOTES = ("On-policy policy gradient (REINFORCE with group baseline): -A * log p, summed over the action tokens of the kept trajectories, divided by their number (at least 1). "
         "A = (reward - mean of its group) / (unbiased standard deviation of its group + eps), over all trajectories of the group, void ones included; a constant. Kept are the trajectories with void 0; a void one changes the loss only through the statistics of its group. "
         "Target of position t is ids[t+1], trained if action_mask[t+1] is 1. rewards, groups, void, masks are constants. All parameters are used. Groups have at least two rows.")
import torch
import torch.nn as nn

V = 20


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, 16)
        self.rnn = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, V)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def make(seed):
    torch.manual_seed(seed)
    B, T = 8, 12
    mask = torch.zeros(B, T)
    mask[:, 3:6] = 1
    mask[:, 8:11] = 1
    mask[::2, 11] = 1
    void = (torch.rand(B) < 0.3).long()
    void[0], void[1] = 0, 1
    return {"model": Tiny(), "ids": torch.randint(0, V, (B, T)), "action_mask": mask, "rewards": torch.rand(B),
            "groups": torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), "void": void}


def right(model, batch, eps=1e-6):
    adv = torch.zeros_like(batch["rewards"])
    for g in batch["groups"].unique():
        rows = batch["groups"] == g
        r = batch["rewards"][rows]
        adv[rows] = (r - r.mean()) / (r.std() + eps)
    logp = model(batch["ids"])[:, :-1].log_softmax(-1).gather(-1, batch["ids"][:, 1:, None]).squeeze(-1)
    keep = batch["action_mask"][:, 1:] * (batch["void"] == 0).to(logp.dtype)[:, None]
    return -(adv[:, None] * logp * keep).sum() / keep.sum().clamp(min=1)


if __name__ == "__main__":
    x = make(0)
    m = x.pop("model")
    l = right(m, x)
    l.backward()
    top = n = 0.0
    lp = m(x["ids"]).log_softmax(-1).detach()
    for b in range(8):
        same = [float(x["rewards"][j]) for j in range(8) if x["groups"][j] == x["groups"][b]]
        mu = sum(same) / len(same)
        sd = (sum((s - mu) ** 2 for s in same) / (len(same) - 1)) ** 0.5
        if x["void"][b]:
            continue
        for t in range(1, 12):
            if x["action_mask"][b, t]:
                top -= (float(x["rewards"][b]) - mu) / (sd + 1e-6) * float(lp[b, t - 1, x["ids"][b, t]])
                n += 1
    print(l.item(), top / n, "gradient", m.head.weight.grad.norm().item())
    assert abs(l.item() - top / n) < 1e-5
