"""Masked diffusion fine-tuning (LLaDA). Cross-entropy at masked answer tokens, divided by the masking rate t of the row and
by the length of the WHOLE answer, not by the number of masked tokens: the likelihood bound needs exactly this. Rows with
no masked token count in the mean with zero."""
FAMILY = "masked"
KIND = "loss"
INPUTS = {"ids": "prompt, answer, padding 0, [rows, time]", "answer_mask": "1 on answer tokens, [rows, time]",
          "t": "masking rate of the row, in (0, 1], [rows]", "u": "uniform numbers, a token is masked where u < t, [rows, time]"}
SETTINGS = {"mask_id": "id of the mask token, 23"}
NOTES = ("Reduction: per row the sum over masked answer tokens of ce / t divided by the answer length (all answer tokens), then "
         "mean over rows. Masked diffusion, two-sided attention, no shift; t and u are constants. Prompt is never masked.")
import torch
import torch.nn as nn
import torch.nn.functional as F


class Attn(nn.Module):
    """One attention layer; `allowed` [rows, query, key] says what is visible."""
    def __init__(self, vocab=24, width=16, length=64):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions, allowed):
        x = self.emb(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        s = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        s = s.masked_fill(~allowed, -1e9)
        return self.head(x + s.softmax(-1) @ v)


def random_rows(n=6, t=12, vocab=24):
    """Right-padded rows: a prompt, trained tokens, then padding (id 0)."""
    ids = torch.randint(1, vocab, (n, t))
    mask = torch.zeros(n, t)
    for i in range(n):
        start, end = int(torch.randint(2, 5, ())), int(torch.randint(6, t + 1, ()))
        mask[i, start:end] = 1.0
        ids[i, end:] = 0
    return ids, mask


def make(seed):
    torch.manual_seed(seed)
    ids, mask = random_rows(6, 14, 23)
    t = 0.15 + 0.85 * torch.rand(6)
    return {"ids": ids, "answer_mask": mask, "t": t, "u": torch.rand(ids.shape), "model": Attn()}


def right(model, batch, mask_id=23):
    ids, answer = batch["ids"], batch["answer_mask"]
    hide = (batch["u"] < batch["t"][:, None]) & (answer > 0)
    noisy = ids.masked_fill(hide, mask_id)
    n, t = ids.shape
    allowed = (ids != 0)[:, None, :].expand(n, t, t)
    logits = model(noisy, torch.arange(t).expand(n, t), allowed)
    ce = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
    per_row = (ce * hide / batch["t"][:, None]).sum(1) / answer.sum(1).clamp(min=1.0)
    return per_row.mean()


def check(loss, model, want, tol=1e-4):
    model.zero_grad()
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    for n, g in grads.items():
        assert g is not None and float(g.abs().sum()) > 0, n
    norm = sum(float(g.pow(2).sum()) for g in grads.values()) ** 0.5
    print("loss %.6f  slow loop %.6f  grad norm %.5f" % (loss.item(), float(want), norm))
    assert abs(loss.item() - float(want)) < tol


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    tot = 0.0
    for i in range(6):
        real = int((d["ids"][i] != 0).sum())
        row = d["ids"][i, :real].clone()
        hid = [j for j in range(real) if d["answer_mask"][i, j] > 0 and d["u"][i, j] < d["t"][i]]
        row[hid] = 23
        lp = m(row[None], torch.arange(real)[None], torch.ones(1, real, real, dtype=torch.bool))[0].log_softmax(-1)
        tot += sum(-float(lp[j, d["ids"][i, j]]) for j in hid) / float(d["t"][i]) / float(d["answer_mask"][i].sum())
    check(right(m, d), m, tot / 6)
