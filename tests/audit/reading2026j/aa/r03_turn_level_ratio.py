"""Turn-level importance ratio for agents: each turn of a trajectory has one ratio, the geometric mean of its token ratios (GSPO at the level of
turns, as in turn-level PPO for agents). In code the ratio is detached and multiplied by exp(logp - logp.detach()), which is 1 in value:
it looks like a no-op, yet it carries the gradient (GSPO-token of Zheng et al. 2025)."""
FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right padded",
          "turn": "number of the assistant turn of the token, from 0; -1 for prompt, tool results and padding, [rows, time]",
          "old_logp": "log probability of the token under the sampling policy, [rows, time]; entry t belongs to ids[:, t]; constant",
          "adv": "advantage of the trajectory, [rows]; constant"}
SETTINGS = {"low": "lower clip of the turn ratio, 0.05", "high": "upper clip of the turn ratio, 0.08"}
NOTES = ("PPO family. Reduction: mean over the tokens of a turn, mean over the turns of a row, mean over the rows that have a turn. A long turn weighs "
         "as much as a short one: intended. Clipping zeroes whole turns. turn[:, 0] is always -1 (no prediction for the first token). "
         "old_logp and adv are constants. All parameters of the model are used.")
import torch
from torch import nn


class TinyLM(nn.Module):
    def __init__(self, vocab=23, width=16):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def _logp(model, ids):
    lp = torch.log_softmax(model(ids[:, :-1]).float(), -1)
    return lp.gather(-1, ids[:, 1:, None])[..., 0]


def right(model, batch, low=0.05, high=0.08):
    logp = _logp(model, batch["ids"])
    turn, old = batch["turn"][:, 1:], batch["old_logp"][:, 1:]
    mask = turn >= 0
    n_turns = int(turn.max().clamp(min=0)) + 1
    slot = turn.clamp(min=0)
    zeros = logp.new_zeros(logp.shape[0], n_turns)
    size = zeros.scatter_add(1, slot, mask.to(logp.dtype))
    log_ratio = (logp - old).masked_fill(~mask, 0.0)
    mean_log = zeros.scatter_add(1, slot, log_ratio) / size.clamp(min=1)
    ratio = mean_log.exp().detach().gather(1, slot) * (logp - logp.detach()).exp()
    adv = batch["adv"][:, None]
    token = -torch.minimum(ratio * adv, ratio.clamp(1 - low, 1 + high) * adv)
    per_turn = zeros.scatter_add(1, slot, token.masked_fill(~mask, 0.0)) / size.clamp(min=1)
    turns = (size > 0).sum(1)
    per_row = per_turn.sum(1) / turns.clamp(min=1)
    loss = per_row.sum() / (turns > 0).sum().clamp(min=1)
    return loss, {"turns": turns.sum().item()}


def make(seed, rows=5, time=18):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = TinyLM()
    ids = torch.randint(1, 23, (rows, time), generator=g)
    turn = torch.full((rows, time), -1)
    for b in range(rows):
        t, k = 2, 0
        while t < time - 1 and k < 3:
            n = int(torch.randint(1, 5, (1,), generator=g))
            turn[b, t:t + n] = k
            t, k = t + n + int(torch.randint(1, 3, (1,), generator=g)), k + 1
        ids[b, t:] = 0
    with torch.no_grad():
        lp = _logp(model, ids)
    old = torch.cat([torch.zeros(rows, 1), lp + 0.1 * torch.randn(lp.shape, generator=g)], 1)
    return {"model": model, "ids": ids, "turn": turn, "old_logp": old.masked_fill(turn < 0, 0.0), "adv": torch.randn(rows, generator=g)}


if __name__ == "__main__":
    for seed in range(5):
        batch = make(seed)
        model = batch.pop("model")
        loss, _ = right(model, batch)
        grad = torch.autograd.grad(loss, list(model.parameters()))
        logp = _logp(model, batch["ids"])
        total = 0.0
        for b in range(len(logp)):
            terms = []
            for k in range(int(batch["turn"][b].max()) + 1):
                ts = [t for t in range(1, batch["ids"].shape[1]) if batch["turn"][b, t] == k]
                s = torch.exp(sum(logp[b, t - 1] - batch["old_logp"][b, t] for t in ts) / len(ts))   # plain turn ratio, differentiated
                a = batch["adv"][b]
                terms.append(-torch.minimum(s * a, s.clamp(0.95, 1.08) * a))
            total = total + sum(terms) / len(terms)
        slow = total / len(logp)
        slow_grad = torch.autograd.grad(slow, list(model.parameters()))
        assert torch.allclose(loss, slow, atol=1e-6), (loss, slow)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(grad, slow_grad))
        assert all(g.abs().sum() > 0 for g in grad)
    print("ok", loss.item(), sum(g.norm() ** 2 for g in grad).sqrt().item())
