"""Distillation with beta = 1 trains nothing. verl-project/verl-recipe#151, https://github.com/verl-project/verl-recipe/issues/151, 2026.
The generalized Jensen-Shannon loss clamps beta into (1e-6, 1 - 1e-6). At both ends the mixture becomes one of the two distributions and the loss goes to zero, so a run
configured with beta 1.0 had a loss of about 1e-6 and no signal, without a warning. Elsewhere the ends are the plain divergences: forward KL at 0, reverse KL at 1."""
import torch
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids that the student wrote, with their prompts, [rows, time]", "loss_mask": "1 on student-written tokens, [rows, time]", "teacher_logits": "teacher's logits on the same tokens, constants, [rows, time, vocabulary]"}
SETTINGS = {"beta": "1.0: reverse KL, KL(student || teacher); 0.0: forward KL; between: generalized JSD"}
NOTES = ("On-policy distillation, mean over the trained tokens. 0 < beta < 1: beta KL(teacher || M) + (1 - beta) KL(student || M) with M = beta teacher + (1 - beta) student; "
         "beta 0 and 1 are defined as the forward and the reverse KL. Gradients flow through the student only.")


class LM(torch.nn.Module):
    """One causal self-attention layer with rotary positions, an MLP and a head. seg: [rows, time], tokens see only their own segment."""
    def __init__(self, vocab=32, width=24, heads=2):
        super().__init__()
        self.heads = heads
        self.emb = torch.nn.Embedding(vocab, width)
        self.n1, self.n2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width))
        self.head = torch.nn.Linear(width, vocab, bias=False)

    def rope(self, x, pos):
        half = x.shape[-1] // 2
        freq = 100.0 ** (-torch.arange(half) / half)
        a = (pos[..., None] * freq)[:, None]
        u, v = x[..., :half], x[..., half:]
        return torch.cat([u * a.cos() - v * a.sin(), u * a.sin() + v * a.cos()], -1)

    def hidden(self, ids, pos=None, seg=None, allow=None):
        b, t = ids.shape
        pos = torch.arange(t).expand(b, t) if pos is None else pos
        x = self.emb(ids)
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        ok = torch.ones(t, t, dtype=torch.bool).tril().expand(b, t, t) if allow is None else allow
        if seg is not None:
            ok = ok & (seg[:, :, None] == seg[:, None, :])
        y = F.scaled_dot_product_attention(self.rope(q, pos), self.rope(k, pos), v, attn_mask=ok[:, None])
        x = x + self.out(y.transpose(1, 2).reshape(b, t, -1))
        return x + self.mlp(self.n2(x))

    def forward(self, ids, pos=None, seg=None, allow=None):
        return self.head(self.hidden(ids, pos, seg, allow))


def make(seed):
    torch.manual_seed(seed)
    mask = torch.ones(3, 9)
    mask[:, :3] = 0
    mask[1, 7:] = 0
    return {"model": LM(), "ids": torch.randint(1, 32, (3, 9)), "loss_mask": mask, "teacher_logits": torch.randn(3, 9, 32)}


def kl(p, q):
    return (p.exp() * (p - q)).sum(-1)


def jsd(p, q, beta):
    w = torch.tensor([beta, 1 - beta]).log()
    m = torch.logaddexp(p + w[0], q + w[1])
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


def mean_over(tokens, batch):
    m = batch["loss_mask"][:, 1:]
    return (tokens * m).sum() / m.sum()


def broken(model, batch, beta=1.0):
    q = model(batch["ids"])[:, :-1].log_softmax(-1)
    p = batch["teacher_logits"][:, :-1].log_softmax(-1)
    beta = min(max(float(beta), 1e-6), 1.0 - 1e-6)
    return mean_over(jsd(p, q, beta), batch)


def right(model, batch, beta=1.0):
    q = model(batch["ids"])[:, :-1].log_softmax(-1)
    p = batch["teacher_logits"][:, :-1].log_softmax(-1)
    if beta == 0.0:
        return mean_over(kl(p, q), batch)
    if beta == 1.0:
        return mean_over(kl(q, p), batch)
    return mean_over(jsd(p, q, beta), batch)


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    for beta in (0.0, 0.5, 1.0):
        print("beta", beta, "broken", broken(m, b, beta).item(), "right", right(m, b, beta).item())
    assert broken(m, b).item() < 1e-4 < right(m, b).item() and broken(m, b, 0.5).item() == right(m, b, 0.5).item()
