"""Sequence boundaries are silently dropped between trainer and model. NVIDIA-NeMo/RL#2105,
https://github.com/NVIDIA-NeMo/RL/issues/2105, 2026.
The trainer wraps the boundaries in one object and passes it as a single named keyword; the custom model takes **attn_kwargs and looks for
cu_seqlens at the top level. Nothing fails: the packed row is attended as one sequence, later documents see earlier ones."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {
    "ids": "packed token ids of several documents, [1, time]",
    "position_ids": "position inside the document, [1, time]",
    "cu_seqlens": "document starts and the end of the row, [documents + 1]",
    "loss_mask": "1 where the token is a trained target; 0 on the first token of each document, [1, time]",
}
SETTINGS = {}
NOTES = "Next-token cross entropy, mean over trained tokens of the row. Documents are independent: attention stays inside a document."


class PackedLM(nn.Module):
    def __init__(self, V=32, D=16):
        super().__init__()
        self.emb, self.pos = nn.Embedding(V, D), nn.Embedding(64, D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, V)

    def forward(self, ids, position_ids, **attn_kwargs):
        h = self.emb(ids) + self.pos(position_ids)
        q, k, v = self.qkv(h).chunk(3, -1)
        T = ids.shape[1]
        keep = torch.ones(T, T, dtype=torch.bool).tril()
        cu = attn_kwargs.get("cu_seqlens")
        if cu is not None:
            doc = torch.bucketize(torch.arange(T), cu[1:-1], right=True)
            keep = keep & (doc[:, None] == doc[None, :])
        s = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~keep, float("-inf"))
        return self.out(h + s.softmax(-1) @ v)


def _nll(logits, ids, mask):
    nll = F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
    m = mask[0, 1:]
    return (nll * m).sum() / m.sum()


def broken(model, batch):
    args = {"ids": batch["ids"], "position_ids": batch["position_ids"]}
    args["flash_attn_kwargs"] = {"cu_seqlens": batch["cu_seqlens"]}
    return _nll(model(**args), batch["ids"], batch["loss_mask"])


def right(model, batch):
    args = {"ids": batch["ids"], "position_ids": batch["position_ids"]}
    args.update({"cu_seqlens": batch["cu_seqlens"]})
    return _nll(model(**args), batch["ids"], batch["loss_mask"])


def make(seed):
    torch.manual_seed(seed)
    lens = [5, 8, 4, 7]
    cu = torch.tensor([0] + lens).cumsum(0)
    ids = torch.randint(0, 32, (1, sum(lens)))
    pos = torch.cat([torch.arange(n) for n in lens])[None]
    return {"model": PackedLM(), "ids": ids, "position_ids": pos, "cu_seqlens": cu, "loss_mask": (pos > 0).float()}


if __name__ == "__main__":
    x = make(0)
    m = x.pop("model")
    a, b = broken(m, x), right(m, x)
    print("broken", a.item(), "right", b.item())
    cu, tot = x["cu_seqlens"].tolist(), 0.0
    for s, e in zip(cu[:-1], cu[1:]):
        lg = m(x["ids"][:, s:e], x["position_ids"][:, s:e])
        tot += F.cross_entropy(lg[0, :-1], x["ids"][0, s + 1:e], reduction="sum").item()
    print("documents one by one", tot / float(x["loss_mask"].sum()))
    assert abs(b.item() - tot / float(x["loss_mask"].sum())) < 1e-5 and abs((a - b).item()) > 1e-4
