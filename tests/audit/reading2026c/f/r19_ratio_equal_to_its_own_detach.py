"""Right: GSPO in token form. The ratio of a token is the detached sequence ratio times exp(logprob - logprob.detach()), a factor that is always 1 and exists only for its gradient. All tokens of a row have the same value of the ratio, so clipping acts on whole rows."""
import torch
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "prompt and answer, [rows, time]", "answer_mask": "1 on answer tokens, [rows, time]", "old_logprobs": "sampler's logprob of each token, 0 outside the answer, [rows, time]", "advantages": "one per row, [rows]"}
SETTINGS = {"clip_low": "0.03", "clip_high": "0.04"}
NOTES = "GSPO: sequence ratio = exp(mean over the answer of logprob - old logprob); clipped surrogate; mean over the tokens of a row, then mean over rows. Every row has an answer. old_logprobs and advantages are constants; all parameters are used."

class Tiny(torch.nn.Module):
    """One attention layer with rotary (relative) positions. `allowed` says which keys a query may see; causal always holds."""
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.q, self.k, self.v = (torch.nn.Linear(width, width, bias=False) for _ in range(3))
        self.head = torch.nn.Linear(width, vocab)

    @staticmethod
    def rotate(x, positions):
        half = x.shape[-1] // 2
        angle = positions[..., None].float() / 10.0 ** (torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def hidden(self, ids, positions=None, allowed=None):
        time = ids.shape[1]
        if positions is None:
            positions = torch.arange(time).expand(ids.shape)
        see = torch.ones(time, time).tril().bool().expand(ids.shape[0], time, time)
        if allowed is not None:
            see = see & (allowed | torch.eye(time).bool())
        x = self.emb(ids)
        q, k = self.rotate(self.q(x), positions), self.rotate(self.k(x), positions)
        scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~see, float("-inf"))
        return x + scores.softmax(-1) @ self.v(x)

    def forward(self, ids, positions=None, allowed=None):
        return self.head(self.hidden(ids, positions, allowed))
def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 32, (4, 13))
    mask = torch.zeros(4, 13)
    for r, (p, end) in enumerate(((4, 13), (5, 9), (3, 10), (6, 12))):
        mask[r, p:end] = 1
    model = Tiny()
    with torch.no_grad():
        lp = F.pad(F.log_softmax(model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1), (1, 0))
    old = (lp + 0.05 * torch.randn(4, 1) + 0.02 * torch.randn(4, 13)) * mask
    return {"model": model, "ids": ids, "answer_mask": mask, "old_logprobs": old, "advantages": torch.tensor([1.0, -0.7, 0.4, -1.2])}

def split(made):
    return made["model"], {k: v for k, v in made.items() if k != "model"}
def parts(model, batch):
    lp = F.log_softmax(model(batch["ids"])[:, :-1], -1).gather(-1, batch["ids"][:, 1:, None]).squeeze(-1)
    return lp, batch["old_logprobs"][:, 1:], batch["answer_mask"][:, 1:], batch["advantages"][:, None]

def right(model, batch, clip_low=0.03, clip_high=0.04):
    lp, old, mask, adv = parts(model, batch)
    sequence = ((lp - old) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    ratio = (sequence.detach() + lp - lp.detach()).exp()
    per_token = -torch.min(ratio * adv, ratio.clamp(1 - clip_low, 1 + clip_high) * adv)
    return ((per_token * mask).sum(-1) / mask.sum(-1)).mean()

def slow(model, batch, clip_low=0.03, clip_high=0.04):
    """The sequence form, row by row."""
    lp, old, mask, adv = parts(model, batch)
    total = 0.0
    for r in range(lp.shape[0]):
        keep = mask[r] > 0
        s = (lp[r][keep] - old[r][keep]).mean().exp()
        total = total - torch.min(s * adv[r, 0], s.clamp(1 - clip_low, 1 + clip_high) * adv[r, 0])
    return total / lp.shape[0]

def grads(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])
if __name__ == "__main__":
    model, batch = split(make(0))
    a, b = right(model, batch), slow(model, batch)
    print("loss", a.item(), b.item(), "gradient", float(grads(a, model).norm()))
    assert torch.allclose(a, b, atol=1e-5) and torch.allclose(grads(a, model), grads(b, model), atol=1e-5) and grads(a, model).norm() > 1e-3
