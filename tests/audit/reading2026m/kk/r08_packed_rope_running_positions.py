"""Packed rows with rotary positions that are not reset (Megatron-LM's --reset-attention-mask without --reset-position-ids). Positions run on across documents; because rotary attention
depends only on differences of positions and attention stays inside the document, nothing changes compared with positions that start at 0."""
import torch
import torch.nn as nn

FAMILY = "packing and positions"
KIND = "loss"
INPUTS = {
    "ids": "token ids of several documents packed one after the other, [rows, time]",
    "doc_ids": "number of the document of each token, from 1, rising within the row; 0 for padding at the end, [rows, time]",
    "loss_mask": "1 where the token is a trained target, [rows, time]; 0 for the first token of each document and for padding",
}
SETTINGS = {}
NOTES = (
    "Next-token cross-entropy over packed rows with a rotary (relative) position model. Attention is causal and restricted to tokens of the same document (the model builds the mask from doc_ids); documents are independent, as if each were alone in its row. The positions are the column numbers 0..time-1 of the row, for all documents: "
    "rotary scores depend on the distance of two positions only, so a document's result does not depend on where it stands. Token t is predicted from position t-1 of the same document. Mean over all trained tokens of all rows. All parameters are used; any number of rows."
)


class RopeAttention(nn.Module):
    def __init__(self, vocab=29, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, vocab)

    @staticmethod
    def _rotate(x, pos):
        half = x.shape[-1] // 2
        ang = pos[..., None].float() * 100.0 ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * ang.cos() - b * ang.sin(), a * ang.sin() + b * ang.cos()], -1)

    def forward(self, ids, doc_ids, positions):
        x = self.emb(ids)
        q, k = self._rotate(self.q(x), positions), self._rotate(self.k(x), positions)
        see = (doc_ids[:, :, None] == doc_ids[:, None]) & torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
        w = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~see, float("-inf")).softmax(-1)
        return self.head(x + self.o(w @ self.v(x)))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    ids, doc, mask = torch.randint(1, 29, (3, 22), generator=g), torch.zeros(3, 22, dtype=torch.long), torch.zeros(3, 22)
    for r in range(3):
        t = 0
        for n in range(1, 4):
            size = int(torch.randint(4, 8, (1,), generator=g))
            doc[r, t:t + size] = n
            mask[r, t + 1:t + size] = 1
            t += size
    return {"model": RopeAttention(), "ids": ids * (doc > 0), "doc_ids": doc, "loss_mask": mask * (doc > 0)}


def right(model, batch):
    ids, m = batch["ids"], batch["loss_mask"]
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    logits = model(ids, batch["doc_ids"], positions)
    lp = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return -(lp * m[:, 1:]).sum() / m.sum()


if __name__ == "__main__":
    for seed in range(3):
        d = make(seed)
        model = d.pop("model")
        loss = right(model, d)
        loss.backward()
        got = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert all(p.grad is not None for p in model.parameters())
        model.zero_grad()
        total, n = 0.0, 0
        for r in range(3):
            for k in range(1, 4):
                one = d["ids"][r][d["doc_ids"][r] == k][None]
                lg = model(one, torch.ones_like(one), torch.arange(one.shape[1])[None])
                total = total - lg[:, :-1].log_softmax(-1).gather(-1, one[:, 1:, None]).sum()
                n += one.shape[1] - 1
        (total / n).backward()
        want = torch.cat([p.grad.flatten() for p in model.parameters()])
        print("seed", seed, "packed %.6f alone %.6f |grad| %.4f difference %.1e" % (loss.item(), total.item() / n, got.norm(), (got - want).norm()))
        assert abs(loss.item() - total.item() / n) < 1e-5 and torch.allclose(got, want, atol=1e-5)
