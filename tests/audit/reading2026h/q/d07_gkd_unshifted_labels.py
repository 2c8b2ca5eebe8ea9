"""Distillation masks logits with labels that were not shifted. modelscope/ms-swift#8436, https://github.com/modelscope/ms-swift/pull/8436, 2026.
In Megatron GKD neither logits nor labels were shifted: the logits at position t predict token t+1, but the mask came from labels at t. The distillation ran on the position of each trained token instead of the position before it.
The first trained token of each answer was never distilled and the position after the last one was. The fix shifts the labels left by one."""
import torch
from torch import nn
FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "labels": "ids on answer tokens, -100 elsewhere, same time index as ids (not shifted), [rows, time]", "teacher_logits": "logits of the teacher on the same ids, [rows, time, vocab]"}
SETTINGS = {"beta": "JSD mixture weight of the teacher, 0.5"}
NOTES = "Generalised Jensen-Shannon divergence between teacher and student over the whole vocabulary, mean over the distilled positions of all rows. Logits at t predict token t+1, so the distilled positions are those whose next token is an answer token. teacher_logits are constants. Uses all parameters of the model."


class TinyLM(nn.Module):
    def __init__(self, vocab=32, width=16, max_pos=64):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, position_ids=None, doc_ids=None):
        n, t = ids.shape
        if position_ids is None:
            position_ids = torch.arange(t).expand(n, t)
        x = self.emb(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        allow = torch.ones(t, t, dtype=torch.bool).tril().expand(n, t, t)
        if doc_ids is not None:
            allow = allow & (doc_ids[:, :, None] == doc_ids[:, None, :])
        score = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        att = score.masked_fill(~allow, float("-inf")).softmax(-1)
        return self.head(torch.tanh(x + self.mix(att @ v)))


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 32, (3, 10))
    labels = torch.full_like(ids, -100)
    for i, (a, b) in enumerate(((4, 9), (3, 8), (5, 10))):
        labels[i, a:b] = ids[i, a:b]
    return {"model": TinyLM(), "ids": ids, "labels": labels, "teacher_logits": 2 * torch.randn(3, 10, 32)}


def _jsd(s, t, beta):
    ls, lt = s.log_softmax(-1), t.log_softmax(-1)
    lm = torch.logaddexp(lt + torch.tensor(beta).log(), ls + torch.tensor(1 - beta).log())
    return beta * (lt.exp() * (lt - lm)).sum(-1) + (1 - beta) * (ls.exp() * (ls - lm)).sum(-1)


def broken(model, batch, beta=0.5):
    mask = batch["labels"] != -100
    return _jsd(model(batch["ids"])[mask], batch["teacher_logits"][mask], beta).mean()


def right(model, batch, beta=0.5):
    labels = torch.roll(batch["labels"], -1, dims=-1)
    labels[:, -1] = -100
    mask = labels != -100
    return _jsd(model(batch["ids"])[mask], batch["teacher_logits"][mask], beta).mean()


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    v = {f.__name__: f(m, d) for f in (broken, right)}
    tot = n = 0
    for i in range(3):
        for t in range(9):
            if d["labels"][i, t + 1] != -100:
                tot = tot + _jsd(m(d["ids"])[i, t], d["teacher_logits"][i, t], 0.5)
                n += 1
    print({k: x.item() for k, x in v.items()}, "loop", (tot / n).item())
    assert abs(v["right"] - tot / n) < 1e-5 and abs(v["broken"] - v["right"]) > 1e-4
