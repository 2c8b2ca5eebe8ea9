"""Policy loss as a mean over turns, not over tokens.
Each assistant turn of a tool rollout is averaged over its own tokens, then the turns of a row are averaged,
then the rows. A short turn (a bare tool call) weighs as much as a long one. That looks like a wrong
denominator next to the usual token mean, but it is the stated objective."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'agents'
KIND = 'loss'
INPUTS = {
    'ids': 'prompt, turns and tool output, [rows, time]',
    'turn': 'number of the assistant turn of each token, 0 = not written by the policy, [rows, time]',
    'advantages': 'one per row, constants, [rows]',
}
SETTINGS = {}
NOTES = (
    'REINFORCE with turn-level normalisation: mean over rows of the mean over turns of the mean over '
    'the tokens of a turn of -advantage * logp. Advantages are constants. '
)


class Tiny(nn.Module):
    """Embedding + learned positions, one causal self-attention layer, MLP, head."""
    def __init__(self, vocab=20, width=16, heads=2, length=64):
        super().__init__()
        self.heads = heads
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def hidden(self, ids, positions=None, allowed=None):
        b, t = ids.shape
        if positions is None:
            positions = torch.arange(t).expand(b, t)
        ok = torch.ones(t, t, dtype=torch.bool).tril().expand(b, t, t)
        if allowed is not None:               # [b, t, t] bool, replaces the causal mask
            ok = allowed
        x = self.emb(ids) + self.pos(positions)
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        s = s.masked_fill(~ok[:, None], float("-inf"))
        x = x + self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))
        return self.norm(x + self.down(F.gelu(self.up(x))))

    def forward(self, ids, positions=None, allowed=None):
        return self.head(self.hidden(ids, positions, allowed))


def token_logps(model, ids, **kw):
    """log-probability of ids[:, 1:] given what comes before, [rows, time - 1]"""
    logits = model(ids, **kw)[:, :-1].log_softmax(-1)
    return logits.gather(-1, ids[:, 1:, None]).squeeze(-1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    turn = torch.zeros(3, 16, dtype=torch.long)
    for i in range(3):
        at = 2
        for k in range(1, 2 + int(torch.randint(1, 3, (1,), generator=g))):
            n = int(torch.randint(1, 5, (1,), generator=g))
            turn[i, at:at + n] = k
            at += n + 2
    return {"model": Tiny(), "ids": torch.randint(0, 20, (3, 16), generator=g), "turn": turn,
            "advantages": torch.randn(3, generator=g)}


def right(model, batch):
    logp, turn = token_logps(model, batch["ids"]), batch["turn"][:, 1:]
    loss = -batch["advantages"][:, None] * logp
    one_hot = F.one_hot(turn, int(turn.max()) + 1).float()[..., 1:]         # [rows, time, turns]
    count = one_hot.sum(1)
    per_turn = (loss[..., None] * one_hot).sum(1) / count.clamp(min=1)
    real = (count > 0).float()
    return ((per_turn * real).sum(1) / real.sum(1).clamp(min=1)).mean()


if __name__ == "__main__":
    b = make(0)
    model = b.pop("model")
    logp = token_logps(model, b["ids"])
    rows = []
    for i in range(3):
        turns = []
        for k in sorted(set(b["turn"][i].tolist()) - {0}):
            where = (b["turn"][i, 1:] == k).nonzero()[:, 0]
            turns.append(sum(-b["advantages"][i] * logp[i, t] for t in where) / len(where))
        rows.append(sum(turns) / len(turns))
    ref = sum(rows) / 3
    loss = right(model, b)
    loss.backward()
    print("loss", loss.item(), "slow loop", ref.item(), "gradient", model.head.weight.grad.norm().item())
    assert torch.allclose(loss, ref, atol=1e-6) and model.head.weight.grad.norm() > 0
