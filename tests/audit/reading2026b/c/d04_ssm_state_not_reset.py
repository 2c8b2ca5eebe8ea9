"""State of the recurrent layer runs over packed samples. NVIDIA-NeMo/RL#2529, https://github.com/NVIDIA-NeMo/RL/pull/2529, 2026.
The packing parameters build the index of the sequence for each token (seq_idx) only when total_tokens is given. The policy left it out,
so the attention layers were separated by cu_seqlens but the Mamba layers got no seq_idx and never reset their state between
packed samples. Log-probabilities of every sample but the first were wrong."""
import torch
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "token ids of several samples packed in one row, [1, time]", "cu_seqlens": "starts of the samples and the end, [samples + 1]",
          "loss_mask": "1 where the token is trained, 0 on prompts and on the first token of a sample, [1, time]"}
SETTINGS = {}
NOTES = ("Supervised loss: mean of the negative log-probability over the trained tokens of the packed row. Samples are independent: packing them must give the "
         "same result as running each alone. The model is a hybrid of one attention layer and one diagonal recurrent layer.")


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


class Hybrid(LM):
    def __init__(self, vocab=32, width=24):
        super().__init__(vocab, width)
        self.a = torch.nn.Parameter(torch.linspace(1.0, 3.0, width))
        self.inp, self.mix = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, ids, params):
        pos, seg, seq_idx = params["pos"], params["seg"], params["seq_idx"]
        x = self.hidden(ids, pos, seg)
        u, state, ys = self.inp(x), torch.zeros(x.shape[0], x.shape[2]), []
        keep = torch.sigmoid(self.a)
        for t in range(ids.shape[1]):
            if seq_idx is not None and t > 0 and seq_idx[t] != seq_idx[t - 1]:
                state = torch.zeros_like(state)
            state = keep * state + u[:, t]
            ys.append(state)
        return self.head(x + self.mix(torch.stack(ys, 1)))


def packed_params(cu_seqlens, total_tokens=None):
    n = int(cu_seqlens[-1])
    seg = torch.bucketize(torch.arange(n), cu_seqlens[1:], right=True)
    pos = torch.arange(n) - cu_seqlens[seg]
    seq_idx = None
    if total_tokens is not None:
        seq_idx = torch.bucketize(torch.arange(total_tokens), cu_seqlens[1:], right=True)
    return {"pos": pos[None], "seg": seg[None], "seq_idx": seq_idx}


def make(seed):
    torch.manual_seed(seed)
    lens = [7, 5, 9]
    cu = torch.tensor([0] + lens).cumsum(0)
    ids = torch.randint(1, 32, (1, sum(lens)))
    mask = torch.ones(1, sum(lens))
    for s in cu[:-1]:
        mask[0, s:s + 2] = 0
    return {"model": Hybrid(), "ids": ids, "cu_seqlens": cu, "loss_mask": mask}


def nll(model, batch, params):
    logp = model(batch["ids"], params).log_softmax(-1)[:, :-1]
    got = logp.gather(-1, batch["ids"][:, 1:, None])[..., 0]
    m = batch["loss_mask"][:, 1:]
    return -(got * m).sum() / m.sum()


def broken(model, batch):
    return nll(model, batch, packed_params(batch["cu_seqlens"]))


def right(model, batch):
    return nll(model, batch, packed_params(batch["cu_seqlens"], total_tokens=batch["ids"].shape[1]))


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    alone, n = 0.0, 0.0
    for s, e in zip(b["cu_seqlens"][:-1], b["cu_seqlens"][1:]):
        one = {"ids": b["ids"][:, s:e], "cu_seqlens": torch.tensor([0, int(e - s)]), "loss_mask": b["loss_mask"][:, s:e]}
        alone += (right(m, one) * one["loss_mask"].sum()).item()
        n += float(one["loss_mask"].sum())
    print("broken", broken(m, b).item(), "right", right(m, b).item(), "each alone", alone / n)
    assert abs(right(m, b).item() - alone / n) < 1e-5 and abs(broken(m, b).item() - alone / n) > 1e-3
