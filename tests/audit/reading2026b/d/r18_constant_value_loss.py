"""The loss has the value 0 at every step and still trains the model.
The ratio is exp(logp - logp.detach()), which is always 1, so with centred advantages the value is 0 whatever the
policy is. Its gradient is that of REINFORCE. Nothing is clipped, because the ratio never leaves 1; the
logged loss says nothing and is not expected to fall."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'losses'
KIND = 'loss'
INPUTS = {
    'ids': 'prompt and completion ids, [rows, time]',
    'loss_mask': '1 where the token is trained, [rows, time]',
    'advantages': 'centred so that the token-weighted mean is 0, constants, [rows]',
}
SETTINGS = {}
NOTES = (
    'Strictly on-policy policy gradient: -advantage * exp(logp - stopgrad(logp)), mean over trained '
    'tokens of all rows. Value about 0 by construction; gradient of -advantage * logp. '
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
    mask = torch.zeros(4, 10)
    for i in range(4):
        mask[i, 3:int(torch.randint(5, 11, (1,), generator=g))] = 1
    adv = torch.randn(4, generator=g)
    n = mask.sum(1)
    return {"model": Tiny(), "ids": torch.randint(0, 20, (4, 10), generator=g), "loss_mask": mask,
            "advantages": adv - (adv * n).sum() / n.sum()}


def right(model, batch):
    logp, mask = token_logps(model, batch["ids"]), batch["loss_mask"][:, 1:]
    ratio = (logp - logp.detach()).exp()
    return (-batch["advantages"][:, None] * ratio * mask).sum() / mask.sum()


if __name__ == "__main__":
    b = make(0)
    model = b.pop("model")
    loss = right(model, b)
    got = torch.autograd.grad(loss, model.head.weight)[0]
    logp = token_logps(model, b["ids"])
    total, n = 0.0, 0
    for i in range(4):
        for t in range(9):
            if b["loss_mask"][i, t + 1]:
                total, n = total - b["advantages"][i] * logp[i, t], n + 1
    ref = torch.autograd.grad(total / n, model.head.weight)[0]
    print("value", loss.item(), "gradient", got.norm().item(), "difference from REINFORCE", (got - ref).abs().max().item())
    assert abs(loss.item()) < 1e-6 and torch.allclose(got, ref, atol=1e-6) and got.norm() > 0
