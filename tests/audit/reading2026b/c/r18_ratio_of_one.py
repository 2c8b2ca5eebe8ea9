"""Policy gradient whose loss value says nothing. The ratio is exp(logp - logp.detach()), always exactly 1, since the data is on-policy and the old log-probabilities are the current ones; the advantages of a group sum to zero, so with
equal lengths the loss is 0 while its gradient is not. The clip never acts. A KL term to the reference is added as its k3 estimate."""
import torch
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "prompts with sampled answers, groups of four rows share a prompt, [rows, time]", "loss_mask": "1 on answer tokens, the same number in all rows, [rows, time]",
          "advantages": "reward minus the mean of the group, sums to zero in each group, constants, [rows]", "ref_logps": "log-probability of each token under the reference, constants, [rows, time]"}
SETTINGS = {"clip": "0.2 (inactive)", "kl": "weight of the KL term, 0.05"}
NOTES = "GRPO, on-policy, one update per batch: old log-probabilities are the detached current ones. Mean over answer tokens of all rows of -min(ratio A, clipped ratio A) + kl * (exp(ref - logp) - (ref - logp) - 1)."


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
    ids = torch.randint(1, 32, (8, 11))
    ids[1:4, :4], ids[5:8, :4] = ids[0, :4], ids[4, :4]
    mask = torch.zeros(8, 11)
    mask[:, 4:] = 1
    reward = torch.rand(2, 4)
    return {"model": LM(), "ids": ids, "loss_mask": mask, "advantages": (reward - reward.mean(1, keepdim=True)).flatten(), "ref_logps": -3.5 + 0.3 * torch.randn(8, 11)}


def right(model, batch, clip=0.2, kl=0.05):
    lp = model(batch["ids"]).log_softmax(-1)[:, :-1].gather(-1, batch["ids"][:, 1:, None])[..., 0]
    ratio, adv, m = (lp - lp.detach()).exp(), batch["advantages"][:, None], batch["loss_mask"][:, 1:]
    pg = -torch.minimum(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv)
    d = batch["ref_logps"][:, 1:] - lp
    return ((pg + kl * (d.exp() - d - 1)) * m).sum() / m.sum()


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    loss = right(m, b, kl=0.0)
    loss.backward()
    got = m.head.weight.grad.clone()
    m.zero_grad()
    lp = m(b["ids"]).log_softmax(-1)[:, :-1].gather(-1, b["ids"][:, 1:, None])[..., 0]
    w = b["loss_mask"][:, 1:]
    (-(lp * b["advantages"][:, None] * w).sum() / w.sum()).backward()          # plain REINFORCE
    print("loss without KL", loss.item(), "with", right(m, b).item(), "gradient norm", got.norm().item(), "difference to REINFORCE", (got - m.head.weight.grad).abs().max().item())
    assert abs(loss.item()) < 1e-6 < got.norm() and torch.allclose(got, m.head.weight.grad, atol=1e-7)
