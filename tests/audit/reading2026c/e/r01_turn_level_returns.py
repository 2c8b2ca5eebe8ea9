"""Turn-level credit: every token of a turn carries the discounted return of its turn, and the discount counts turns, not
tokens. Observation tokens sit in the middle of the row with mask 0: they are attended, get no loss, and the return runs
across them without decay. Rows are normalised by their own trained tokens first and then averaged (each rollout counts
the same), so the loss is not a token mean."""
FAMILY = "agents"
KIND = "loss"
import torch
import torch.nn as nn
import torch.nn.functional as F
INPUTS = {"ids": "rollouts with several turns, [rows, time]", "action_mask": "1 on tokens the policy wrote, [rows, time]",
          "turn": "index of the turn of each token, 0 .. turns - 1, [rows, time]", "turn_rewards": "reward of each turn, [rows, turns], constant"}
SETTINGS = {"gamma": "discount per turn, 0.9"}
NOTES = ("REINFORCE. Reduction: mean over the action tokens of a row, then mean over rows. Return of a turn = its reward + "
         "gamma * return of the next turn. No baseline. Each row has at least one action token.")


class TinyLM(nn.Module):
    """One causal attention layer; positions are learned."""

    def __init__(self, vocab=29, width=16, length=48):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, attention_mask=None, position_ids=None, allowed=None):
        rows, time = ids.shape
        if position_ids is None:
            position_ids = torch.arange(time).expand(rows, time)
        x = self.tok(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        score = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        see = torch.ones(time, time, dtype=torch.bool).tril().expand(rows, time, time)
        if allowed is not None:
            see = allowed
        if attention_mask is not None:
            see = see & attention_mask.bool()[:, None, :]
        score = score.masked_fill(~see, -1e9)
        return self.head(x + self.out(torch.tanh(score.softmax(-1) @ v)))


def make(seed):
    torch.manual_seed(seed)
    rows, turns, per = 3, 3, 6
    turn = torch.arange(turns).repeat_interleave(per).expand(rows, -1).contiguous()
    action_mask = torch.zeros(rows, turns * per, dtype=torch.long)
    for r in range(rows):
        for k in range(turns):
            begin = k * per + 2 + (r + k) % 2
            action_mask[r, begin:(k + 1) * per] = 1
    return {"model": TinyLM(), "ids": torch.randint(0, 29, (rows, turns * per)), "action_mask": action_mask, "turn": turn,
            "turn_rewards": torch.randn(rows, turns)}


def right(model, batch, gamma=0.9):
    rewards = batch["turn_rewards"]
    turns = rewards.shape[1]
    gap = torch.arange(turns)[None, :] - torch.arange(turns)[:, None]
    discount = torch.where(gap >= 0, gamma ** gap.clamp(min=0).float(), torch.zeros(()))
    returns = rewards @ discount.T
    per_token = returns.gather(1, batch["turn"])[:, 1:]
    mask = batch["action_mask"][:, 1:].float()
    logp = model(batch["ids"])[:, :-1].log_softmax(-1).gather(-1, batch["ids"][:, 1:, None])[..., 0]
    return (-(logp * per_token * mask).sum(1) / mask.sum(1)).mean()


if __name__ == "__main__":
    data = make(0)
    model = data.pop("model")
    loss = right(model, data)
    loss.backward()
    logp = model(data["ids"]).log_softmax(-1)
    slow = 0.0
    for r in range(3):
        part, n = 0.0, 0
        for t in range(1, data["ids"].shape[1]):
            if data["action_mask"][r, t]:
                k = data["turn"][r, t].item()
                ret = sum(0.9 ** (j - k) * data["turn_rewards"][r, j].item() for j in range(k, 3))
                part, n = part - ret * logp[r, t - 1, data["ids"][r, t]].item(), n + 1
        slow += part / n / 3
    print(loss.item(), slow, "grad", sum(p.grad.norm() for p in model.parameters()).item())
    assert abs(loss.item() - slow) < 1e-4
