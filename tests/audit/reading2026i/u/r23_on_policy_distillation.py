"""On-policy distillation as a policy gradient (Thinking Machines 2025; MiniLLM). The per-token advantage is teacher log-prob minus student log-prob of the sampled token, detached; there is no reward, no baseline and no sum over the vocabulary. Advantages contain the student's own log-probabilities (constant) and are mostly negative; the gradient is an unbiased one-sample estimate of that of the reverse KL per token."""
import math
import torch

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids sampled by the student, [rows, time]", "loss_mask": "1 where the token is trained, [rows, time]; column 0 never", "sampled_logprobs": "student log-probabilities at sampling time, [rows, time]", "teacher_logprobs": "teacher log-probabilities of the same tokens, [rows, time]"}
SETTINGS = {}
NOTES = "Importance-weighted policy gradient: -(exp(lp - sampled) * advantage), advantage = teacher - sampled (constant), discount 0 (each token only its own KL). Mean over trained tokens of all rows. The teacher is a constant."

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
    model, teacher = TinyLM(), TinyLM()
    with torch.no_grad():                              # wide logits, so that the student's samples matter
        model.head.weight.mul_(3)
    ids = torch.randint(0, 32, (4, 3))
    for _ in range(7):                                 # the completion is sampled by the student
        nxt = torch.multinomial(model(ids)[:, -1].detach().softmax(-1), 1)
        ids = torch.cat([ids, nxt], 1)
    mask = torch.zeros(4, 10); mask[:, 3:] = 1; mask[1, 7:] = 0
    def lp(m):
        out = torch.zeros(4, 10)
        out[:, 1:] = torch.log_softmax(m(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0].detach()
        return out
    return {"model": model, "ids": ids, "loss_mask": mask, "sampled_logprobs": lp(model) + 0.02 * torch.randn(4, 10), "teacher_logprobs": lp(teacher)}


def right(model, batch):
    ids, mask = batch["ids"], batch["loss_mask"][:, 1:]
    lp = torch.log_softmax(model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    advantage = (batch["teacher_logprobs"] - batch["sampled_logprobs"])[:, 1:].detach()
    ratio = torch.exp(lp - batch["sampled_logprobs"][:, 1:])
    loss = (-(ratio * advantage) * mask).sum() / mask.sum()
    return loss, {"reverse_kl": (-(advantage * mask).sum() / mask.sum()).item()}


if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    loss, metrics = right(m, b); loss.backward()
    lp = torch.log_softmax(m(b["ids"]), -1); tot = n = 0
    for i in range(4):
        for t in range(1, 10):
            if b["loss_mask"][i, t]:
                s = b["sampled_logprobs"][i, t].item()
                tot -= math.exp(lp[i, t - 1, b["ids"][i, t]].item() - s) * (b["teacher_logprobs"][i, t].item() - s); n += 1
    # on all tokens of the vocabulary, weighted by the student, this gradient is that of the reverse KL
    p = torch.randn(7, requires_grad=True); q = torch.log_softmax(torch.randn(7), -1)
    l = torch.log_softmax(p, -1)
    exact = torch.autograd.grad((l.exp() * (l - q)).sum(), p, retain_graph=True)[0]
    pg = torch.autograd.grad(-(l.detach().exp() * torch.exp(l - l.detach()) * (q - l.detach())).sum(), p)[0]
    print(loss.item(), tot / n, metrics, m.emb.weight.grad.norm().item())
    assert abs(loss.item() - tot / n) < 1e-5 and torch.allclose(exact, pg, atol=1e-6)
