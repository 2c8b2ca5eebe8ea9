"""Multi-turn tool agent with turn-level credit. Rewards are per turn; the return of a turn sums later turns of the SAME row, the baseline is the mean over rows that reached this turn, and the loss is a mean over turns of a mean over the turn's tokens, so a short tool call weighs as much as a long answer."""
FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "[rows, time]; user, tool and assistant text in one row", "turn": "0 for tokens not written by the model (prompt, tool output, padding), else the turn number 1.., [rows, time]", "turn_rewards": "reward of each turn, 0 where the turn does not exist, [rows, turns]"}
SETTINGS = {"gamma": "discount per TURN, not per token, 0.9"}
NOTES = "On-policy policy gradient; mean over tokens of a turn, then mean over all turns of all rows. All rows belong to one prompt. Rewards constants. A turn only one row reached has advantage zero."
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

V, D = 23, 16


class Tiny(nn.Module):
    """Causal recurrent model: ids [rows, time] -> logits [rows, time, V]."""

    def __init__(self, out=V):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.rnn = nn.GRU(D, D, batch_first=True)
        self.head = nn.Linear(D, out, bias=False)

    def hidden(self, ids):
        return self.rnn(self.emb(ids))[0]

    def forward(self, ids):
        return self.head(self.hidden(ids))


def token_logps(model, ids):
    """log p(ids[:, t+1] | ids[:, :t+1]), shape [rows, time-1]."""
    lp = F.log_softmax(model(ids)[:, :-1].float(), dim=-1)
    return lp.gather(-1, ids[:, 1:, None]).squeeze(-1)


def base_rows(seed, rows=6, time=10, prompt=3):
    torch.manual_seed(seed)
    model = Tiny()
    ids = torch.randint(1, V, (rows, time))
    length = torch.randint(prompt + 2, time + 1, (rows, 1))
    pos = torch.arange(time)[None]
    ids = ids.masked_fill(pos >= length, 0)
    loss_mask = ((pos >= prompt) & (pos < length)).float()
    return model, ids, loss_mask


def flat_grad(model, loss):
    params = list(model.parameters())
    gs = torch.autograd.grad(loss, params, allow_unused=True, retain_graph=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in zip(params, gs)])


def make(seed):
    model, ids, _ = base_rows(seed, rows=4, time=14)
    ids = torch.randint(1, V, (4, 14))
    turn = torch.tensor([[0, 0, 0, 1, 1, 0, 0, 2, 0, 3, 3, 3, 3, 3], [0, 0, 0, 1, 0, 0, 2, 2, 2, 2, 0, 0, 0, 0],
                         [0, 0, 0, 1, 1, 1, 1, 0, 2, 2, 0, 0, 3, 0], [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0]])
    rew = torch.randn(4, 3) * (torch.arange(1, 4)[None] <= turn.max(1).values[:, None])
    return {"model": model, "ids": ids, "turn": turn, "turn_rewards": rew}


def right(model, batch, gamma=0.9):
    turn, rew = batch["turn"], batch["turn_rewards"]
    K = rew.shape[1]
    ret = torch.zeros_like(rew); run = torch.zeros(rew.shape[0])
    for k in reversed(range(K)):
        run = rew[:, k] + gamma * run
        ret[:, k] = run
    onehot = F.one_hot(turn, K + 1)[..., 1:].float()[:, 1:]
    count = onehot.sum(1)
    has = (count > 0).float()
    base = (ret * has).sum(0) / has.sum(0).clamp(min=1)
    adv = (ret - base) * has
    per_turn = torch.einsum("bt,btk->bk", token_logps(model, batch["ids"]), onehot) / count.clamp(min=1)
    return -(adv * per_turn).sum() / has.sum()


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss = right(model, b); g = flat_grad(model, loss); lp = token_logps(model, b["ids"]); n = 0; tot = 0.0
    R = lambda i, k: sum(0.9 ** (j - k) * b["turn_rewards"][i, j].item() for j in range(k, 3))
    for k in range(3):
        rows = [i for i in range(4) if (b["turn"][i] == k + 1).any()]
        for i in rows:
            a = R(i, k) - sum(R(j, k) for j in rows) / len(rows)
            tot = tot - a * lp[i][b["turn"][i, 1:] == k + 1].mean(); n += 1
    tot = tot / n
    assert torch.allclose(loss, tot, atol=1e-5) and torch.allclose(g, flat_grad(model, tot), atol=1e-5) and g.norm() > 0
    print("loss", loss.item(), "turns", n, "grad", g.norm().item())
