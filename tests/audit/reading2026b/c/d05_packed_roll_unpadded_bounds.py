"""Roll of the multi-token-prediction tensors uses the unpadded bounds. NVIDIA/Megatron-LM#6205, https://github.com/NVIDIA/Megatron-LM/pull/6205, 2026.
When each packed sequence is padded, the tensors lie at the padded offsets, but the roll that shifts ids, labels and loss mask for the
multi-token-prediction head took its bounds from the unpadded cu_seqlens. Tokens moved over sequence bounds, the fill value landed in the wrong
slots and a tail was not rolled at all. No error, only a wrong auxiliary loss."""
import torch
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "token ids, sequences packed in one row, each padded to a multiple of four, [1, time]", "labels": "next token of the same sequence at each place, [1, time]",
          "loss_mask": "1 where the label is trained, [1, time]", "cu_seqlens": "cumulative true lengths, [sequences + 1]",
          "cu_seqlens_padded": "cumulative padded lengths, the layout of the row, [sequences + 1]"}
SETTINGS = {"mtp_weight": "weight of the second-next-token loss, 0.3"}
NOTES = ("Main loss: mean of the next-token negative log-probability over the trained labels. Auxiliary: a second head sees the hidden state at t and the embedding of token t+1 and predicts "
         "token t+2 of the same sequence; mean over the places where that target exists and is trained. Total: main + mtp_weight * auxiliary. Nothing may cross sequences.")


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


class MTP(LM):
    def __init__(self, vocab=32, width=24):
        super().__init__(vocab, width)
        self.join = torch.nn.Linear(2 * width, width)


def make(seed):
    torch.manual_seed(seed)
    lens, padded = [6, 3, 7], [8, 4, 8]
    cu, cup = torch.tensor([0] + lens).cumsum(0), torch.tensor([0] + padded).cumsum(0)
    ids, labels, mask = (torch.zeros(1, sum(padded), dtype=torch.long) for _ in range(3))
    for s, n in zip(cup[:-1], lens):
        x = torch.randint(1, 32, (n,))
        ids[0, s:s + n] = x
        labels[0, s:s + n - 1] = x[1:]
        mask[0, s:s + n - 1] = 1
    return {"model": MTP(), "ids": ids, "labels": labels, "loss_mask": mask.float(), "cu_seqlens": cu, "cu_seqlens_padded": cup}


def roll_packed(x, cu):
    y = x.clone()
    for s, e in zip(cu[:-1].tolist(), cu[1:].tolist()):
        y[0, s:e] = torch.roll(x[0, s:e], -1)
        y[0, e - 1] = 0
    return y


def total(model, batch, cu, mtp_weight):
    cup = batch["cu_seqlens_padded"]
    t = torch.arange(batch["ids"].shape[1])
    seg = torch.bucketize(t, cup[1:], right=True)[None]
    h = model.hidden(batch["ids"], (t - cup[seg[0]])[None], seg)

    def mean_nll(logits, labels, mask):
        return (F.cross_entropy(logits[0], labels[0], reduction="none") * mask[0]).sum() / mask.sum()

    main = mean_nll(model.head(h), batch["labels"], batch["loss_mask"])
    next_ids, labels, mask = (roll_packed(batch[k], cu) for k in ("ids", "labels", "loss_mask"))
    aux = mean_nll(model.head(model.join(torch.cat([h, model.emb(next_ids)], -1))), labels, mask)
    return main + mtp_weight * aux


def broken(model, batch, mtp_weight=0.3):
    return total(model, batch, batch["cu_seqlens"], mtp_weight)


def right(model, batch, mtp_weight=0.3):
    return total(model, batch, batch["cu_seqlens_padded"], mtp_weight)


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    main, aux = [], []
    for s, n in zip(b["cu_seqlens_padded"][:-1].tolist(), b["cu_seqlens"].diff().tolist()):
        x = b["ids"][:, s:s + n]
        h = m.hidden(x)[0]
        main.append(F.cross_entropy(m.head(h)[:-1], x[0, 1:], reduction="none"))
        aux.append(F.cross_entropy(m.head(m.join(torch.cat([h[:-2], m.emb(x[0, 1:-1])], -1))), x[0, 2:], reduction="none"))
    want = (torch.cat(main).mean() + 0.3 * torch.cat(aux).mean()).item()
    print("broken", broken(m, b).item(), "right", right(m, b).item(), "explicit loop", want)
    assert abs(right(m, b).item() - want) < 1e-5 and abs(broken(m, b).item() - want) > 1e-3
