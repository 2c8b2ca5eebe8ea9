"""A preference loss that may be negative and whose gradient does not fade when the margin is large.
Robust DPO assumes that a share eps of the labels is flipped and subtracts the loss of the flipped pair, divided by
1 - 2 eps. The term of the rejected order has a minus sign, the value has no lower bound at 0, and
the weights of the two orders do not sum to a convex mixture."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'losses'
KIND = 'loss'
INPUTS = {
    'ids': 'rows: all chosen, then all rejected texts, [2 * pairs, time]',
    'loss_mask': '1 on completion tokens, [2 * pairs, time]',
    'ref_logps': 'summed log-probability of each completion under the reference, constants, [2 * pairs]',
}
SETTINGS = {
    'beta': 'DPO temperature, 0.5',
    'eps': 'assumed share of flipped labels, 0.2',
}
NOTES = (
    'rDPO: margin h = beta * ((logp_c - ref_c) - (logp_r - ref_r)), log-probabilities summed over '
    'completion tokens; loss = [(1-eps) * -logsigmoid(h) - eps * -logsigmoid(-h)] / (1 - 2 eps), '
    'mean over pairs. Reference values are constants. Negative values are possible. '
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
    model = Tiny()
    ids = torch.randint(0, 20, (6, 10), generator=g)
    ids[3:, :4] = ids[:3, :4]
    mask = torch.zeros(6, 10)
    for i in range(6):
        mask[i, 4:int(torch.randint(6, 11, (1,), generator=g))] = 1
    with torch.no_grad():
        ref = (token_logps(model, ids) * mask[:, 1:]).sum(1) + torch.randn(6, generator=g) * 2
        ref[0], ref[3] = ref[0] - 12, ref[3] + 12           # one pair with a large margin
    return {"model": model, "ids": ids, "loss_mask": mask, "ref_logps": ref}


def right(model, batch, beta=0.5, eps=0.2):
    logp = (token_logps(model, batch["ids"]) * batch["loss_mask"][:, 1:]).sum(1)
    chosen, rejected = (logp - batch["ref_logps"]).chunk(2)
    h = beta * (chosen - rejected)
    per_pair = ((1 - eps) * -F.logsigmoid(h) - eps * -F.logsigmoid(-h)) / (1 - 2 * eps)
    return per_pair.mean()


if __name__ == "__main__":
    b = make(0)
    model = b.pop("model")
    lp = token_logps(model, b["ids"])
    terms = []
    for i in range(3):
        s = [sum(lp[j, t] for t in range(9) if b["loss_mask"][j, t + 1]) - b["ref_logps"][j] for j in (i, i + 3)]
        p = torch.sigmoid((0.5 * (s[0] - s[1])).double())
        terms.append((0.8 * -torch.log(p) - 0.2 * -torch.log(1 - p)) / 0.6)
    loss = right(model, b)
    loss.backward()
    print("loss", loss.item(), "pairs", [round(x.item(), 4) for x in terms], "gradient", model.head.weight.grad.norm().item())
    assert abs(loss.item() - (sum(terms) / 3).item()) < 1e-4 and min(x.item() for x in terms) < 0
    # unbiased: over flips with probability eps the mean is the plain DPO loss
    h = torch.tensor(0.7, dtype=torch.double)
    r = lambda x: (0.8 * -F.logsigmoid(x) - 0.2 * -F.logsigmoid(-x)) / 0.6
    assert abs(float(0.8 * r(h) + 0.2 * r(-h)) - float(-F.logsigmoid(h))) < 1e-9
