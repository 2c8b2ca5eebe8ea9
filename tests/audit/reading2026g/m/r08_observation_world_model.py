"""SFT of an agent that also trains on the tool outputs. Observation tokens, which are normally masked, get a cross-entropy of small weight as a world-model task (implicit world modelling of "Agent Learning via Early Experience"). The two parts have their own token counts, so a long tool output does not drown the actions."""
FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0",
          "roles": "[rows, time], 0 = system, user and padding (untrained), 1 = the agent's own tokens, 2 = tool output"}
SETTINGS = {"obs_weight": "weight of the tool-output part, 0.1"}
NOTES = "Supervised. Reduction: mean over all action tokens of the batch + obs_weight x mean over all observation tokens of the batch. A batch without observations has just the first part. Training on tool tokens is intended. No parameter unused."
import torch
from torch import nn


class TinyLM(nn.Module):
    def __init__(self, vocab=32, width=16, max_len=96):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_len, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions=None, mask=None):
        """ids [B, T]; positions [B, T]; mask [B, T, T], True where query may see key. Returns logits [B, T, V]."""
        B, T = ids.shape
        if positions is None:
            positions = torch.arange(T).expand(B, T)
        if mask is None:
            mask = torch.ones(T, T, dtype=torch.bool).tril().expand(B, T, T)
        x = self.emb(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        a = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        a = a.masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + self.out(a @ v)
        return self.head(torch.tanh(x))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    B, T = 4, 20
    ids = torch.randint(1, 32, (B, T), generator=g)
    roles = torch.zeros(B, T, dtype=torch.long)
    for b in range(B):
        roles[b, 4:7] = 1
        roles[b, 7:11 + b] = 2
        roles[b, 11 + b:14 + b] = 1
        ids[b, 14 + b:] = 0
    return {"model": TinyLM(), "ids": ids, "roles": roles}


def right(model, batch, obs_weight=0.1):
    ids, roles = batch["ids"], batch["roles"][:, 1:]
    nll = -model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    part = lambda m: (nll * m).sum() / m.sum().clamp(min=1)
    act, obs = part(roles == 1), part(roles == 2)
    return act + obs_weight * obs, {"action": act.item(), "observation": obs.item()}


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    loss, info = right(m, b)
    loss.backward()
    s, n = {1: 0.0, 2: 0.0}, {1: 0, 2: 0}
    for r in range(4):
        lp = m(b["ids"][r:r + 1])[0].log_softmax(-1)
        for t in range(1, 20):
            k = int(b["roles"][r, t])
            if k:
                s[k] -= lp[t - 1, b["ids"][r, t]].item()
                n[k] += 1
    ref = s[1] / n[1] + 0.1 * s[2] / n[2]
    gn = sum(p.grad.norm() for p in m.parameters())
    print(loss.item(), ref, info, "grad", gn.item())
    assert abs(loss.item() - ref) < 1e-5 and gn > 0
