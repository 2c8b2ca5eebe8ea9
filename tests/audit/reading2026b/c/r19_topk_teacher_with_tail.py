"""Distillation from the teacher's top eight entries and one bucket for the rest. The teacher's stored probabilities do not sum to one; the missing mass is the bucket 'rest', and the student's rest is computed as log(1 - sum of its probabilities on the same eight). The loss is a KL
over nine outcomes. Student entries outside the eight get a gradient through the bucket only. A temperature of two is used on both sides with the factor of four."""
import torch
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where trained, at the place that predicts, [rows, time]", "top_ids": "teacher's eight most likely next tokens, [rows, time, 8]", "top_logps": "their log-probabilities at temperature two, constants, [rows, time, 8]; their probabilities sum to less than one"}
SETTINGS = {"temperature": "2.0, the loss is multiplied by its square"}
NOTES = "Forward KL(teacher || student) over the eight stored tokens and the rest as one outcome; mean over trained places, times the squared temperature. Only the student has a gradient."


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
    mask[0, :3] = 0
    mask[:, -1] = 0
    top = (3 * torch.randn(3, 9, 32) / 2.0).log_softmax(-1).topk(8, -1)
    return {"model": LM(), "ids": torch.randint(1, 32, (3, 9)), "loss_mask": mask, "top_ids": top.indices, "top_logps": top.values}


def right(model, batch, temperature=2.0):
    student = (model(batch["ids"]) / temperature).log_softmax(-1).gather(-1, batch["top_ids"])
    rest = lambda logps: torch.log1p(-logps.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
    teacher = torch.cat([batch["top_logps"], rest(batch["top_logps"])], -1)
    student = torch.cat([student, rest(student)], -1)
    kl = (teacher.exp() * (teacher - student)).sum(-1)
    return temperature ** 2 * (kl * batch["loss_mask"]).sum() / batch["loss_mask"].sum()


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    loss = right(m, b)
    total, n = 0.0, 0
    probs = (m(b["ids"]) / 2.0).softmax(-1).double()
    for i in range(3):
        for t in range(9):
            if b["loss_mask"][i, t]:
                p, q = b["top_logps"][i, t].double().exp(), probs[i, t, b["top_ids"][i, t]]
                p, q = torch.cat([p, 1 - p.sum(0, True)]), torch.cat([q, 1 - q.sum(0, True)])
                total += (p * (p / q).log()).sum().item()
                n += 1
    loss.backward()
    print("loss", loss.item(), "explicit loop", 4 * total / n, "gradient norm", m.emb.weight.grad.norm().item())
    assert abs(loss.item() - 4 * total / n) < 1e-4 and m.emb.weight.grad.norm() > 0
