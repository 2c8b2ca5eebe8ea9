"""Sequence-level policy loss averages advantages over padding. areal-project/AReaL#1346, https://github.com/areal-project/AReaL/pull/1346, 2026.
For padded 2D batches, the sequence-level (GSPO) branch averaged the token advantages of a row into one advantage without applying loss_mask.
Values at masked positions, which whitening makes non-zero, changed the loss and the gradient of the valid tokens."""
import math
import torch

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token is trained (completion, no padding), [rows, time]; column 0 is never trained", "old_logprobs": "log-probabilities under the sampling policy, [rows, time], 0 where not trained", "advantages": "advantage per token, [rows, time], whitened over the batch; the values at untrained positions mean nothing"}
SETTINGS = {"clip": "PPO clip on the sequence ratio, 0.2"}
NOTES = "GSPO: the ratio is the exponential of the mean log ratio over the trained tokens of the row, one advantage per row (mean of the token advantages of its trained tokens), mean over the trained tokens of all rows. old_logprobs and advantages are constants. Any number of rows."


class TinyLM(torch.nn.Module):
    """One causal attention layer with fixed sinusoidal positions; every parameter is used by every forward."""
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, vocab)

    def hidden(self, ids, positions=None, mask=None):
        b, t = ids.shape
        w = self.emb.embedding_dim
        if positions is None:
            positions = torch.arange(t).expand(b, t)
        if mask is None:
            mask = torch.ones(t, t, dtype=torch.bool).tril().expand(b, t, t)
        freq = torch.exp(-torch.arange(0, w, 2).float() / w * math.log(100.0))
        ang = positions.float().unsqueeze(-1) * freq
        x = self.emb(ids) + torch.cat([ang.sin(), ang.cos()], -1)
        q, k, v = self.qkv(x).chunk(3, -1)
        score = q @ k.transpose(-1, -2) / math.sqrt(w)
        score = score.masked_fill(~mask, -1e9)
        return x + self.out(score.softmax(-1) @ v)

    def forward(self, ids, positions=None, mask=None):
        return self.head(self.hidden(ids, positions, mask))


def make(seed):
    torch.manual_seed(seed)
    model = TinyLM()
    ids = torch.randint(1, 32, (4, 12))
    mask = torch.zeros(4, 12)
    for i, (a, b) in enumerate([(3, 12), (4, 8), (2, 7), (5, 10)]):
        mask[i, a:b] = 1
    lp = torch.log_softmax(model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0].detach()
    old = torch.zeros(4, 12)
    old[:, 1:] = lp + 0.1 * torch.randn_like(lp)
    old = old * mask
    reward = torch.tensor([1.0, 0.0, 0.3, 1.0])
    adv = reward[:, None] * mask                      # reward on the row's trained tokens, then whitened
    mean = (adv * mask).sum() / mask.sum()
    var = ((adv - mean) ** 2 * mask).sum() / mask.sum()
    adv = (adv - mean) / (var + 1e-5).sqrt()
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logprobs": old, "advantages": adv}


def _ratio(model, batch):
    ids, mask = batch["ids"], batch["loss_mask"]
    lp = torch.log_softmax(model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    lp = torch.cat([torch.zeros(ids.shape[0], 1), lp], 1)
    diff = (lp - batch["old_logprobs"]) * mask
    return torch.exp(diff.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1))


def broken(model, batch, clip=0.2):
    mask, adv = batch["loss_mask"], batch["advantages"]
    ratio = _ratio(model, batch).expand_as(mask)
    count = mask.sum(1, keepdim=True).clamp(min=1)
    seq = (adv.sum(1, keepdim=True) / count).expand_as(mask)
    loss = torch.max(-seq * ratio, -seq * ratio.clamp(1 - clip, 1 + clip))
    return (loss * mask).sum() / mask.sum()


def right(model, batch, clip=0.2):
    mask, adv = batch["loss_mask"], batch["advantages"]
    ratio = _ratio(model, batch).expand_as(mask)
    count = mask.sum(1, keepdim=True).clamp(min=1)
    seq = ((adv * mask).sum(1, keepdim=True) / count).expand_as(mask)
    loss = torch.max(-seq * ratio, -seq * ratio.clamp(1 - clip, 1 + clip))
    return (loss * mask).sum() / mask.sum()


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    lb, lr = broken(m, b), right(m, b)
    lr.backward()
    print("broken", lb.item(), "right", lr.item(), "grad", m.head.weight.grad.norm().item())
    c = dict(b, advantages=torch.where(b["loss_mask"] > 0, b["advantages"], torch.full_like(b["advantages"], 7.0)))
    assert abs(right(m, c).item() - lr.item()) < 1e-6 and abs(broken(m, c).item() - lb.item()) > 1e-3
    assert abs(lb.item() - lr.item()) > 1e-3
