"""Observations are trained too, with a small weight. Some agent recipes ("Don't mask the environment" / ActObs, world-model
auxiliary losses such as ECHO) deliberately keep a small next-token loss on the environment's tokens beside the action
loss, so that the policy learns what its actions cause. The two terms are normalised by their own token counts."""
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "system prompt, actions and observations [rows, time]", "action_mask": "1 on the agent's tokens [rows, time]",
          "observation_mask": "1 on the environment's tokens [rows, time]; prompt and padding have neither"}
SETTINGS = {"obs_weight": "weight of the observation loss, 0.1"}
NOTES = ("Supervised: mean cross-entropy over all action tokens of the batch + obs_weight * mean cross-entropy over all "
         "observation tokens of the batch. Observations carry gradient on purpose. Each mean has its own denominator "
         "(0 observations: that term is 0).")


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
    rows, time = 4, 16
    act, obs = torch.zeros(rows, time), torch.zeros(rows, time)
    act[:, 3:6], obs[:, 6:10], act[:, 10:14] = 1, 1, 1
    act[3, 10:] = 0
    obs[3, 8:] = 0
    return {"model": TinyLM(), "batch": {"ids": torch.randint(0, 32, (rows, time)), "action_mask": act, "observation_mask": obs}}


def right(model, batch, obs_weight=0.1):
    ids = batch["ids"]
    nll = F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")
    act, obs = batch["action_mask"][:, 1:], batch["observation_mask"][:, 1:]
    action_loss = (nll * act).sum() / act.sum().clamp(min=1)
    observation_loss = (nll * obs).sum() / obs.sum().clamp(min=1)
    return action_loss + obs_weight * observation_loss, {"action": action_loss.item(), "observation": observation_loss.item()}


if __name__ == "__main__":
    d = make(0)
    loss, metrics = right(**d)
    loss.backward()
    lp = d["model"](d["batch"]["ids"]).log_softmax(-1)
    sums = {}
    for key in ("action_mask", "observation_mask"):
        v = [-lp[i, t - 1, d["batch"]["ids"][i, t]] for i in range(4) for t in range(1, 16) if d["batch"][key][i, t]]
        sums[key] = sum(v) / len(v)
    slow = sums["action_mask"] + 0.1 * sums["observation_mask"]
    print(loss.item(), slow.item(), metrics, d["model"].head.weight.grad.norm().item())
    assert torch.allclose(loss, slow, atol=1e-5) and d["model"].head.weight.grad.norm() > 0
