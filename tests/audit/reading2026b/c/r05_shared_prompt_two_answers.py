"""Chosen and rejected answer share one prompt in one row. The row is prompt, chosen, rejected. The rejected tokens do not see the chosen ones (attention mask with a hole) and their positions jump back to the
end of the prompt. The first token of the rejected answer is predicted from the last prompt token, not from the token before it in the row."""
import torch
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "prompt, chosen answer, rejected answer, [rows, time], the same lengths in all rows", "part": "0 on prompt, 1 on chosen, 2 on rejected tokens, [time]", "ref_logps": "reference log-probabilities of the two answers, constants, [rows, 2]"}
SETTINGS = {"beta": "0.1"}
NOTES = "DPO, sigmoid loss, mean over rows. Each answer's log-probability is the sum over its tokens given the prompt alone, as if prompt + answer were a row of its own."


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
    part = torch.tensor([0] * 4 + [1] * 5 + [2] * 6)
    return {"model": LM(), "ids": torch.randint(1, 32, (3, 15)), "part": part, "ref_logps": -18.0 + torch.randn(3, 2)}


def right(model, batch, beta=0.1):
    ids, part = batch["ids"], batch["part"]
    n, c = int((part == 0).sum()), int((part == 1).sum())
    t = torch.arange(len(part))
    allow = torch.ones(len(t), len(t), dtype=torch.bool).tril() & ~((part[:, None] == 2) & (part[None] == 1))
    pos = torch.where(part == 2, t - c, t).expand_as(ids)
    before = t - 1
    before[n + c] = n - 1
    logp = model(ids, pos, allow=allow.expand(len(ids), -1, -1)).log_softmax(-1)
    lp = logp[:, before[1:]].gather(-1, ids[:, 1:, None])[..., 0]
    chosen, rejected = ((lp * (part[1:] == k)).sum(1) for k in (1, 2))
    ref = batch["ref_logps"]
    return -F.logsigmoid(beta * ((chosen - ref[:, 0]) - (rejected - ref[:, 1]))).mean()


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    loss = right(m, b)

    def alone(keep):
        x = b["ids"][:, keep]
        lp = m(x).log_softmax(-1)[:, :-1].gather(-1, x[:, 1:, None])[..., 0]
        return lp[:, 3:].sum(1)

    margin = (alone(b["part"] < 2) - b["ref_logps"][:, 0]) - (alone(b["part"] != 1) - b["ref_logps"][:, 1])
    want = -F.logsigmoid(0.1 * margin).mean().item()
    loss.backward()
    print("loss", loss.item(), "two rows per pair", want, "gradient norm", m.emb.weight.grad.norm().item())
    assert abs(loss.item() - want) < 1e-5 and m.emb.weight.grad.norm() > 0
