"""Recurrent state runs across the samples of a packed row. NVIDIA-NeMo/Automodel#2131,
https://github.com/NVIDIA-NeMo/Automodel/issues/2131, 2026. The packed recipe gave the segment boundaries to the attention layers, but
the gated DeltaNet layers of Qwen3.5 were run over the whole row without them. The recurrent state of one sample therefore
entered the next sample; the loss fell as usual, but a sample's output depended on its neighbours in the row."""
import torch
import torch.nn as nn

FAMILY = "packing and positions"
KIND = "loss"
INPUTS = {
    "ids": "token ids of several samples packed one after the other, [rows, time]",
    "doc_ids": "number of the sample each token belongs to, from 1, rising within the row; 0 for the padding at the end of the row, [rows, time]",
    "loss_mask": "1 where the token is trained as a target, [rows, time]; 0 for the first token of each sample and for padding",
}
SETTINGS = {}
NOTES = (
    "Next-token cross-entropy over packed rows. Samples of a row are independent: the loss of a sample is the same as if it were alone in its "
    "row, and a change of one sample does not change the log-probabilities of another. Token t is predicted from position t-1 of the same "
    "sample; the first token of a sample is no target. Mean over all trained tokens of all rows (one mean over the batch). "
    "All parameters of the model are used. Any number of rows."
)


class GatedLinear(nn.Module):
    """h_t = f_t * h_{t-1} + (1 - f_t) * k_t; where a new sample starts (doc_ids given) h_{t-1} is 0."""

    def __init__(self, vocab=29, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.gate = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.head = nn.Linear(2 * width, vocab)

    def forward(self, ids, doc_ids=None):
        x = self.emb(ids)
        f, k = torch.sigmoid(self.gate(x) + 2.0), torch.tanh(self.key(x))
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(ids.shape[1]):
            if doc_ids is not None and t > 0:
                h = h * (doc_ids[:, t] == doc_ids[:, t - 1]).to(h.dtype)[:, None]
            h = f[:, t] * h + (1 - f[:, t]) * k[:, t]
            out.append(h)
        return self.head(torch.cat([torch.stack(out, 1), x], -1))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    rows, time = 3, 20
    ids = torch.randint(1, 29, (rows, time), generator=g)
    doc = torch.zeros(rows, time, dtype=torch.long)
    mask = torch.zeros(rows, time)
    for r in range(rows):
        t = 0
        for n in range(1, 4):
            size = int(torch.randint(4, 7, (1,), generator=g))
            doc[r, t:t + size] = n
            mask[r, t + 1:t + size] = 1
            t += size
    return {"model": GatedLinear(), "ids": ids * (doc > 0), "doc_ids": doc, "loss_mask": mask}


def _nll(logits, ids, mask):
    lp = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return -(lp * mask[:, 1:]).sum() / mask.sum()


def broken(model, batch):
    return _nll(model(batch["ids"]), batch["ids"], batch["loss_mask"])


def right(model, batch):
    return _nll(model(batch["ids"], batch["doc_ids"]), batch["ids"], batch["loss_mask"])


if __name__ == "__main__":
    for s in range(3):
        d = make(s)
        model = d.pop("model")
        total, n = 0.0, 0
        for r in range(3):
            for k in range(1, 4):
                one = d["ids"][r][d["doc_ids"][r] == k][None]
                lp = model(one)[:, :-1].log_softmax(-1).gather(-1, one[:, 1:, None])
                total, n = total - lp.sum().item(), n + lp.numel()
        g = []
        for f in (broken, right):
            model.zero_grad()
            l = f(model, d)
            l.backward()
            assert all(p.grad is not None for p in model.parameters())
            g.append((l.item(), torch.cat([p.grad.flatten() for p in model.parameters()]).clone()))
        print("seed", s, "broken %.5f right %.5f alone %.5f  |grad difference| %.4f" % (g[0][0], g[1][0], total / n, (g[0][1] - g[1][1]).norm()))
        assert abs(g[1][0] - total / n) < 1e-5 and abs(g[0][0] - total / n) > 1e-4
