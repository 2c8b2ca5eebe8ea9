"""Each turn of an agent rollout is its own row, weighted by one over the rollout's action tokens. The context of a turn may be rewritten (old reasoning removed), so a rollout cannot be one row. The
earlier turns appear again as untrained prompt in later rows; the same action is trained once only, in the row of its turn. Every row of a rollout carries the same advantage and the weight
1 / (tokens of the rollout), so that a rollout counts once, whatever the number of its rows."""
import torch
import torch.nn.functional as F

FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "one row per turn: context, then the action of this turn, right padded with 0, [turns, time]", "action_mask": "1 on the action of this row's turn only, [turns, time]",
          "rollout": "index of the rollout of each row, [turns]", "advantages": "advantage of each rollout, constants, [rollouts]"}
SETTINGS = {}
NOTES = "REINFORCE family, on-policy. Mean over rollouts of (sum over all action tokens of all turns of the rollout / number of these tokens) times the advantage, negated. Rows of one rollout share their advantage."


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
    rollout = torch.tensor([0, 0, 0, 1, 2, 2])
    ids, mask = torch.randint(1, 32, (6, 16)), torch.zeros(6, 16)
    ids[1, :6], ids[2, :6], ids[5, :5] = ids[0, :6], ids[0, :6], ids[4, :5]
    ids[2, 6:10] = ids[1, 6:10]
    for i, (s, e) in enumerate(((3, 6), (6, 10), (10, 12), (4, 9), (3, 5), (8, 15))):
        mask[i, s:e] = 1
        ids[i, e:] = 0
    return {"model": LM(), "ids": ids, "action_mask": mask, "rollout": rollout, "advantages": torch.randn(3)}


def right(model, batch):
    lp = model(batch["ids"]).log_softmax(-1)[:, :-1].gather(-1, batch["ids"][:, 1:, None])[..., 0]
    mask, r = batch["action_mask"][:, 1:], batch["rollout"]
    n = len(batch["advantages"])
    tokens = torch.zeros(n).index_add(0, r, mask.sum(1))
    weight = batch["advantages"][r] / tokens[r] / n
    return -((lp * mask).sum(1) * weight).sum()


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    loss = right(m, b)
    want = 0.0
    for k in range(3):
        lps = []
        for i in range(6):
            if b["rollout"][i] == k:
                logp = m(b["ids"][i:i + 1])[0].log_softmax(-1)
                lps += [logp[t - 1, b["ids"][i, t]].item() for t in range(1, 16) if b["action_mask"][i, t]]
        want -= b["advantages"][k].item() * sum(lps) / len(lps) / 3
    loss.backward()
    print("loss", loss.item(), "explicit loop", want, "gradient norm", m.emb.weight.grad.norm().item())
    assert abs(loss.item() - want) < 1e-5 and m.emb.weight.grad.norm() > 0
