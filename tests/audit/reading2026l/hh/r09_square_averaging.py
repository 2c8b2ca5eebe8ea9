"""Square averaging of packed rows (InternVL 2.5, arXiv 2412.05271, section on loss reweighting): a trained token of a document with n trained tokens
weighs n ** -0.5, and the sum is divided by the sum of weights; neither a token mean nor a document mean."""
FAMILY = "packing and positions"
KIND = "loss"
INPUTS = {"ids": "token ids [rows, time], several documents per row", "position_ids": "position within the document [rows, time], 0 on padding", "segment_ids": "1, 2, ... the document of the row, 0 padding [rows, time]",
          "labels": "already shifted targets [rows, time]: next token of the same document, -100 for prompt targets, the last token of each document and padding"}
SETTINGS = {}
NOTES = """(model, batch) -> scalar. Packed SFT loss. model(ids, position_ids, segment_ids) gives logits [rows, time, vocabulary]; its attention is causal and
limited to the same segment. labels[t] is the target of the logits at t (already shifted, no further shift in the loss); -100 is ignored. A trained token of
a document with n trained tokens (n counted per row and segment) has the weight 1 / sqrt(n), so a document has total weight sqrt(n): between
the token mean and the document mean, on purpose. loss = sum over all rows of weight * cross-entropy / sum over all rows of weight. The weights
are constants. Documents without a trained token have no part. All model parameters are used. Any number of rows."""
import torch
from torch import nn
import torch.nn.functional as F


class LM(nn.Module):
    def __init__(self, v=40, d=16, max_pos=32):
        super().__init__()
        self.emb, self.pos = nn.Embedding(v, d), nn.Embedding(max_pos, d)
        self.qkv, self.out, self.head = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, v)

    def forward(self, ids, position_ids, segment_ids):
        x = self.emb(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        t = ids.shape[1]
        ok = (segment_ids[:, :, None] == segment_ids[:, None, :]) & torch.ones(t, t, dtype=torch.bool).tril()
        return self.head(x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=ok)))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    B, T = 3, 24
    ids, pos, seg = (torch.zeros(B, T, dtype=torch.long) for _ in range(3))
    labels = torch.full((B, T), -100)
    for b in range(B):
        t, s = 0, 1
        while True:
            n = int(torch.randint(3, 13, (1,), generator=g))
            if t + n > T:
                break
            doc = torch.randint(1, 40, (n,), generator=g)
            prompt = int(torch.randint(1, n, (1,), generator=g))
            ids[b, t:t + n], pos[b, t:t + n], seg[b, t:t + n] = doc, torch.arange(n), s
            labels[b, t + prompt - 1:t + n - 1] = doc[prompt:]
            t, s = t + n, s + 1
    return {"model": LM(), "ids": ids, "position_ids": pos, "segment_ids": seg, "labels": labels}


def right(model, batch):
    logits = model(batch["ids"], batch["position_ids"], batch["segment_ids"])
    labels, seg = batch["labels"], batch["segment_ids"]
    trained = labels != -100
    n_seg = int(seg.max()) + 1
    counts = torch.zeros(len(seg), n_seg).scatter_add_(1, seg, trained.float())
    weight = counts.gather(1, seg).clamp(min=1).rsqrt() * trained
    ce = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100).view_as(labels)
    return (ce * weight).sum() / weight.sum()


if __name__ == "__main__":
    x = make(0)
    m = x.pop("model")
    loss = right(m, x)
    loss.backward()
    num = den = 0.0
    for b in range(3):
        for s in range(1, int(x["segment_ids"][b].max()) + 1):
            k = x["segment_ids"][b] == s
            i, l = x["ids"][b, k][None], x["labels"][b, k]
            n = int((l != -100).sum())
            lp = m(i, torch.arange(i.shape[1])[None], torch.ones_like(i))[0].log_softmax(-1)
            for t in range(len(l)):
                if l[t] != -100:
                    num, den = num - lp[t, l[t]].item() / n ** .5, den + n ** -.5
    print("loss", loss.item(), "each document alone", num / den, "all parameters have gradients", all(p.grad.abs().sum() > 0 for p in m.parameters()))
    assert abs(loss.item() - num / den) < 1e-5
