"""Bounds of the packed trajectories never reach attention. NVIDIA-NeMo/RL#4167, https://github.com/NVIDIA-NeMo/RL/issues/4167, 2026.
The policy passed the packing metadata nested under one keyword, the attention layer of the custom model looked for the fields at the top level
and ignored unknown keywords. It fell back to plain causal attention over the packed row, so each trajectory attended to those before it.
Log-probabilities and the policy gradient of all but the first trajectory were wrong, without an error."""
import torch
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "token ids of several trajectories packed in one row, [1, time]", "cu_seqlens": "starts of the trajectories and the end, [trajectories + 1]",
          "position_ids": "position inside the own trajectory, [1, time]", "old_logprobs": "log-probability of each token when sampled, constants, [1, time]",
          "advantages": "advantage of the token's trajectory, constants, [1, time]", "loss_mask": "1 on tokens that the policy wrote, [1, time]"}
SETTINGS = {"clip": "PPO clip, 0.2"}
NOTES = "Clipped policy-gradient loss (PPO/GRPO family), mean over the trained tokens of the packed row. Each trajectory must be treated as if it ran alone."


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


class Policy(LM):
    def forward(self, ids, position_ids=None, **kwargs):
        cu, seg = kwargs.get("cu_seqlens"), None
        if cu is not None:
            seg = torch.bucketize(torch.arange(ids.shape[1]), cu[1:], right=True)[None]
        return super().forward(ids, position_ids, seg)


def make(seed):
    torch.manual_seed(seed)
    lens = [6, 8, 5]
    n = sum(lens)
    cu = torch.tensor([0] + lens).cumsum(0)
    seg = torch.bucketize(torch.arange(n), cu[1:], right=True)
    mask = torch.ones(1, n)
    for s in cu[:-1]:
        mask[0, s:s + 2] = 0
    return {"model": Policy(), "ids": torch.randint(1, 32, (1, n)), "cu_seqlens": cu, "position_ids": (torch.arange(n) - cu[seg])[None],
            "old_logprobs": -3.5 + 0.5 * torch.randn(1, n), "advantages": torch.randn(len(lens))[seg][None], "loss_mask": mask}


def policy_loss(logits, batch, clip):
    lp = logits.log_softmax(-1)[:, :-1].gather(-1, batch["ids"][:, 1:, None])[..., 0]
    ratio = (lp - batch["old_logprobs"][:, 1:]).exp()
    adv, m = batch["advantages"][:, 1:], batch["loss_mask"][:, 1:]
    return -(torch.minimum(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv) * m).sum() / m.sum()


def broken(model, batch, clip=0.2):
    flash_attn_kwargs = {"cu_seqlens": batch["cu_seqlens"]}
    return policy_loss(model(batch["ids"], batch["position_ids"], flash_attn_kwargs=flash_attn_kwargs), batch, clip)


def right(model, batch, clip=0.2):
    flash_attn_kwargs = {"cu_seqlens": batch["cu_seqlens"]}
    return policy_loss(model(batch["ids"], batch["position_ids"], **flash_attn_kwargs), batch, clip)


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    rows = []
    for s, e in zip(b["cu_seqlens"][:-1], b["cu_seqlens"][1:]):
        one = {k: v[:, s:e] for k, v in b.items() if k != "cu_seqlens"}
        one["cu_seqlens"] = torch.tensor([0, int(e - s)])
        rows.append((right(m, one).item(), float(one["loss_mask"].sum())))
    alone = sum(a * n for a, n in rows) / sum(n for _, n in rows)
    print("broken", broken(m, b).item(), "right", right(m, b).item(), "each alone", alone)
    assert abs(right(m, b).item() - alone) < 1e-5 and abs(broken(m, b).item() - alone) > 1e-3
