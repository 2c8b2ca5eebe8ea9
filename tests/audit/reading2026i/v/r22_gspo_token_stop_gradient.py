"""GSPO-token: a ratio that is the sequence's in value and the token's in gradient. Zheng et al. 2025 (arXiv 2507.18071):
s_it = sg[s_i] * pi(token) / sg[pi(token)], i.e. exp(sg[mean log-ratio] + logp - sg[logp]). In value every token of a row has
the same, length-normalised ratio; the quotient logp - sg[logp] is zero and only carries the gradient. The clip is tiny and
two-sided with unequal bounds."""
import torch
from torch import nn

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "[rows, time]", "response_mask": "1 on the response's tokens [rows, time]", "old_logprobs": "of ids[:, 1:], constant [rows, time-1]",
          "advantages": "per token, constant [rows, time-1]"}
SETTINGS = {"clip_low": "lower clip, 3e-4", "clip_high": "upper clip, 4e-4"}
NOTES = ("Mean over rows of the mean over the row's response tokens. With advantages equal over a row it has the gradient of "
         "sequence-level GSPO. When the ratio is outside the clip on the wrong side the whole row has no gradient. "
         "Each row has a response token.")


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
    model, ids = TinyLM(), torch.randint(0, 32, (5, 12))
    mask = torch.zeros(5, 12)
    for i in range(5):
        mask[i, 4:6 + i] = 1
    with torch.no_grad():
        lp = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    adv = torch.randn(5, 1).expand(5, 11).clone()
    return {"model": model, "batch": {"ids": ids, "response_mask": mask, "old_logprobs": lp + 3e-4 * torch.randn_like(lp), "advantages": adv}}


def right(model, batch, clip_low=3e-4, clip_high=4e-4):
    ids, mask = batch["ids"], batch["response_mask"][:, 1:]
    logp = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    length = mask.sum(1)
    sequence = ((logp - batch["old_logprobs"]) * mask).sum(1) / length
    ratio = (sequence.detach()[:, None] + logp - logp.detach()).exp()
    adv = batch["advantages"]
    token = -torch.minimum(ratio * adv, ratio.clamp(1 - clip_low, 1 + clip_high) * adv)
    return ((token * mask).sum(1) / length).mean()


if __name__ == "__main__":
    d = make(0)
    loss = right(**d)
    g = torch.autograd.grad(loss, d["model"].head.weight)[0]
    b = d["batch"]                                       # sequence-level GSPO, row by row
    rows = []
    for i in range(5):
        lp = d["model"](b["ids"][i:i + 1, :-1]).log_softmax(-1)[0].gather(-1, b["ids"][i, 1:, None]).squeeze(-1)
        m = b["response_mask"][i, 1:].bool()
        s = (lp[m] - b["old_logprobs"][i][m]).mean().exp()
        a = b["advantages"][i, 0]
        rows.append(-torch.minimum(s * a, s.clamp(1 - 3e-4, 1 + 4e-4) * a))
    slow = torch.stack(rows).mean()
    h = torch.autograd.grad(slow, d["model"].head.weight)[0]
    print(loss.item(), slow.item(), g.norm().item(), (g - h).abs().max().item())
    assert torch.allclose(loss, slow, atol=1e-6) and torch.allclose(g, h, atol=1e-6) and g.norm() > 0
