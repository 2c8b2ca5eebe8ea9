"""Several rows per trajectory, normalised by the number of trajectories. Practice of agent RL stacks that re-render the context between turns (reasoning of earlier turns is dropped, context is compacted): a trajectory becomes one training row per turn.
Every row of a trajectory carries the same advantage, and the sum over tokens is divided by (number of trajectories x a constant length), neither by rows nor by tokens. A trajectory with more rows rightly has more terms."""
import torch
from torch import nn
FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]; one row per turn", "action_mask": "1 on tokens the policy wrote in that turn, 0 on context and padding, [rows, time]", "traj": "index of the trajectory of each row, [rows]", "advantages": "one advantage per trajectory, [trajectories]", "old_logps": "log-prob of each token at sampling time, 0 at the first position, [rows, time]"}
SETTINGS = {"clip": "PPO clip, 0.2", "max_tokens": "constant length that divides (Dr. GRPO), 16"}
NOTES = "PPO clipped surrogate. Reduction: sum over action tokens of all rows divided by (number of trajectories * max_tokens), so neither a mean over rows nor over tokens. Rows of one trajectory share its advantage. Context tokens repeat across rows of a trajectory, but are masked. advantages, old_logps, masks are constants. Uses all parameters."


class TinyLM(nn.Module):
    def __init__(self, vocab=32, width=16, max_pos=64):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, position_ids=None, doc_ids=None):
        n, t = ids.shape
        if position_ids is None:
            position_ids = torch.arange(t).expand(n, t)
        x = self.emb(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        allow = torch.ones(t, t, dtype=torch.bool).tril().expand(n, t, t)
        if doc_ids is not None:
            allow = allow & (doc_ids[:, :, None] == doc_ids[:, None, :])
        score = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        att = score.masked_fill(~allow, float("-inf")).softmax(-1)
        return self.head(torch.tanh(x + self.mix(att @ v)))


def make(seed):
    torch.manual_seed(seed)
    traj = torch.tensor([0, 0, 0, 1, 2, 2])
    n, t = len(traj), 12
    model = TinyLM()
    ids = torch.randint(0, 32, (n, t))
    mask = torch.zeros(n, t)
    for i in range(n):
        a = 3 + i % 3
        mask[i, a:a + 4 + i % 2] = 1
    with torch.no_grad():
        lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        old = torch.cat([torch.zeros(n, 1), lp + 0.1 * torch.randn_like(lp)], 1)
    return {"model": model, "ids": ids, "action_mask": mask, "traj": traj, "advantages": torch.tensor([1.0, -0.8, 0.3]), "old_logps": old}


def right(model, batch, clip=0.2, max_tokens=16):
    ids = batch["ids"]
    lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    ratio = (lp - batch["old_logps"][:, 1:]).exp()
    adv = batch["advantages"][batch["traj"]][:, None]
    per = -torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv)
    return (per * batch["action_mask"][:, 1:]).sum() / (len(batch["advantages"]) * max_tokens)


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    loss = right(m, d)
    loss.backward()
    lp = m(d["ids"]).log_softmax(-1)
    tot = 0.0
    for k in range(3):
        for i in [i for i in range(6) if d["traj"][i] == k]:
            for t in range(1, 12):
                if d["action_mask"][i, t]:
                    r = (lp[i, t - 1, d["ids"][i, t]] - d["old_logps"][i, t]).exp().item()
                    A = d["advantages"][k].item()
                    tot += -min(r * A, max(0.8, min(1.2, r)) * A)
    print("loss", loss.item(), "loop", tot / (3 * 16), "grad", m.head.weight.grad.norm().item())
    assert abs(loss.item() - tot / 48) < 1e-5 and m.head.weight.grad.norm() > 0
