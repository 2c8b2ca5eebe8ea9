"""GSPO-token: the sequence ratio without gradient times pi / pi.detach(). Zheng et al. 2025, "Group Sequence Policy Optimization", eq. 14; TRL importance_sampling_level, verl.
The ratio's value is the same on all tokens of a row (geometric mean of the token ratios), the gradient goes through each token's own log-prob by lp - lp.detach(), which is numerically zero. The clip range is tiny (3e-4, 4e-4) because the ratio is length-normalised."""
import torch
from torch import nn
FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "mask": "1 on completion tokens, at the token's own index, [rows, time]", "old_logps": "log-probs at sampling time, [rows, time], 0 at the first position", "advantages": "advantage per row, [rows]"}
SETTINGS = {"low": "lower clip, 3e-4", "high": "upper clip, 4e-4"}
NOTES = "Reduction: mean over tokens within the row, then mean over rows. Sequence-level importance ratio exp(mean of (lp - old)) with stop-gradient, clipped to [1 - low, 1 + high], PPO minimum. No KL. Rows outside the clip range have no gradient (this is how the clip works). old_logps, advantages, masks are constants. Uses all parameters."


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
    model = TinyLM()
    ids = torch.randint(0, 32, (4, 10))
    mask = torch.zeros(4, 10)
    for i, n in enumerate((6, 4, 7, 3)):
        mask[i, 2:2 + n] = 1
    with torch.no_grad():
        lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        old = torch.cat([torch.zeros(4, 1), lp + 3e-4 * torch.randn_like(lp)], 1)
    return {"model": model, "ids": ids, "mask": mask, "old_logps": old, "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5])}


def right(model, batch, low=3e-4, high=4e-4):
    lp = model(batch["ids"])[:, :-1].log_softmax(-1).gather(-1, batch["ids"][:, 1:, None])[..., 0]
    mask = batch["mask"][:, 1:]
    n = mask.sum(1)
    seq = ((lp - batch["old_logps"][:, 1:]) * mask).sum(1) / n
    log_ratio = lp - lp.detach() + seq.detach()[:, None]
    r = log_ratio.exp()
    A = batch["advantages"][:, None]
    per = -torch.min(r * A, r.clamp(1 - low, 1 + high) * A)
    return ((per * mask).sum(1) / n).mean()


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    g = torch.autograd.grad(right(m, d), list(m.parameters()))
    lp = m(d["ids"])[:, :-1].log_softmax(-1).gather(-1, d["ids"][:, 1:, None])[..., 0]
    mk = d["mask"][:, 1:]                                     # plain GSPO has the same value and gradient with row-level advantages
    s = (((lp - d["old_logps"][:, 1:]) * mk).sum(1) / mk.sum(1)).exp()
    A = d["advantages"]
    plain = -torch.min(s * A, s.clamp(1 - 3e-4, 1 + 4e-4) * A).mean()
    h = torch.autograd.grad(plain, list(m.parameters()))
    print(right(m, d).item(), plain.item(), "grad", g[-1].norm().item(), "ratios", s.tolist())
    assert abs(right(m, d) - plain) < 1e-6 and max((a - b).abs().max().item() for a, b in zip(g, h)) < 1e-6 and g[-1].norm() > 0
