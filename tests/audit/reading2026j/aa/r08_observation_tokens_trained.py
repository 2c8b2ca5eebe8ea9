"""Tool results ARE trained here: policy gradient on the action tokens and, with a small weight, cross entropy on the observation tokens (implicit world
modelling, 'Agent Learning via Early Experience', Zhang et al. 2025). The observation part has no advantage: the world is predicted in bad trajectories as well."""
FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right padded", "role": "0 prompt or padding, 1 token written by the agent, 2 token of a tool result, [rows, time]",
          "adv": "advantage of the trajectory, [rows], constant"}
SETTINGS = {"beta": "weight of the world-model part, 0.1"}
NOTES = ("REINFORCE plus supervised. Reduction: each part is the mean over its own tokens of all rows (so the parts have different denominators). On-policy, one update per sample: "
         "no ratio. Observation tokens are wanted in the loss; role[:, 0] is 0. adv constant. All parameters used. A batch without observations or without actions has that part 0.")
import torch
from torch import nn
import torch.nn.functional as F


class TinyLM(nn.Module):
    def __init__(self, vocab=29, width=16):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def right(model, batch, beta=0.1):
    ids, role = batch["ids"], batch["role"][:, 1:]
    logits = model(ids[:, :-1]).float()
    nll = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(role.shape)
    act, obs = (role == 1).to(nll.dtype), (role == 2).to(nll.dtype)
    policy = (nll * batch["adv"][:, None] * act).sum() / act.sum().clamp(min=1)
    world = (nll * obs).sum() / obs.sum().clamp(min=1)
    return policy + beta * world, {"policy": policy.item(), "world": world.item()}


def make(seed, rows=4, time=15):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    ids = torch.randint(1, 29, (rows, time), generator=g)
    role = torch.zeros(rows, time, dtype=torch.long)
    for b in range(rows):
        t, k = 3, 1
        end = time - int(torch.randint(0, 5, (1,), generator=g))
        while t < end:
            n = int(torch.randint(1, 4, (1,), generator=g))
            role[b, t:min(t + n, end)] = k
            t, k = t + n, 3 - k
        ids[b, end:] = 0
    return {"model": TinyLM(), "ids": ids, "role": role, "adv": torch.randn(rows, generator=g)}


if __name__ == "__main__":
    for seed in range(4):
        batch = make(seed)
        model = batch.pop("model")
        loss, m = right(model, batch)
        grad = torch.autograd.grad(loss, list(model.parameters()))
        p, w, np_, nw = 0.0, 0.0, 0, 0
        for b in range(len(batch["ids"])):
            for t in range(1, batch["ids"].shape[1]):
                kind = int(batch["role"][b, t])
                if kind == 0:
                    continue
                lp = torch.log_softmax(model(batch["ids"][b:b + 1, :t])[0, -1], -1)[batch["ids"][b, t]]
                if kind == 1:
                    p, np_ = p - batch["adv"][b] * lp, np_ + 1
                else:
                    w, nw = w - lp, nw + 1
        slow = p / np_ + 0.1 * w / nw
        sg = torch.autograd.grad(slow, list(model.parameters()))
        assert torch.allclose(loss, slow, atol=1e-5)
        assert all(torch.allclose(a, b, atol=1e-5) and a.abs().sum() > 0 for a, b in zip(grad, sg))
    print("ok", loss.item(), m)
