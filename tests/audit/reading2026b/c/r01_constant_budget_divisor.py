"""Agent policy gradient divided by a constant token budget. The loss of a multi-turn rollout is the sum over action tokens divided by rows * max_tokens, a constant,
not by the number of trained tokens (Dr. GRPO). Rows of tool output only, and rows cut before the first action, give exactly 0 and still count in the divisor. It looks like a
wrong mean, but it removes the length bias: a token weighs the same in a short and in a long rollout."""
import torch
import torch.nn.functional as F

FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "prompt, actions and observations of each rollout, right padded with 0, [rows, time]", "action_mask": "1 on tokens that the policy wrote, [rows, time]; may be all 0 in a row",
          "advantages": "one number per rollout, constants, [rows]"}
SETTINGS = {"max_tokens": "constant token budget of a rollout, 64"}
NOTES = "REINFORCE family, on-policy: minus the sum over action tokens of advantage times log-probability, divided by rows * max_tokens (a constant, on purpose). Observations and padding are not trained."


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
    ids, mask = torch.randint(1, 32, (4, 18)), torch.zeros(4, 18)
    for i, spans in enumerate(([(3, 6), (9, 12)], [(4, 8), (11, 13), (15, 18)], [(5, 7)], [])):
        for s, e in spans:
            mask[i, s:e] = 1
    ids[2, 9:] = 0
    return {"model": LM(), "ids": ids, "action_mask": mask, "advantages": torch.randn(4)}


def right(model, batch, max_tokens=64):
    lp = model(batch["ids"]).log_softmax(-1)[:, :-1].gather(-1, batch["ids"][:, 1:, None])[..., 0]
    per_row = (lp * batch["action_mask"][:, 1:]).sum(1) * batch["advantages"]
    return -per_row.sum() / (len(per_row) * max_tokens)


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    loss = right(m, b)
    want = 0.0
    for i in range(4):
        logp = m(b["ids"][i:i + 1])[0].log_softmax(-1)
        for t in range(1, 18):
            if b["action_mask"][i, t]:
                want -= (b["advantages"][i] * logp[t - 1, b["ids"][i, t]]).item()
    loss.backward()
    print("loss", loss.item(), "explicit loop", want / (4 * 64), "gradient norm", m.head.weight.grad.norm().item())
    assert abs(loss.item() - want / 256) < 1e-5 and m.head.weight.grad.norm() > 0
