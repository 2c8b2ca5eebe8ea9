"""Distillation from the teacher's top-k only, the rest as one tail class. As in radixark/miles#1322 and verl#7855 (tail-bucket top-k KL).
The teacher sends k log-probabilities per position, not normalized over k. Both sides get one more class: the mass outside the k tokens. The student's tail uses all its other logits, so these keep a gradient although the teacher names none of them. Renormalizing over k would be another loss."""
import torch
import torch.nn as nn
import torch.nn.functional as F
FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the NEXT token is distilled (logits at t), [rows, time]", "topk_ids": "teacher's k best ids at each position, [rows, time, k]", "topk_logprobs": "their log-probabilities in the full vocabulary (they sum to less than 1), [rows, time, k]"}
SETTINGS = {}
NOTES = "Forward KL(teacher || student) over k+1 classes, mean over distilled positions of all rows. It is a lower bound of the full KL. Teacher entries are constants. topk_ids at a position are distinct. All parameters are used."

class Tiny(nn.Module):
    def __init__(self, vocab=31, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def make(seed):
    torch.manual_seed(seed); m, teacher = Tiny(), Tiny(); ids = torch.randint(1, 31, (3, 10)); mask = torch.zeros(3, 10)
    for b in range(3):
        mask[b, 2:6 + b] = 1
    with torch.no_grad():
        v, i = torch.log_softmax(3 * teacher(ids), -1).topk(4, -1)
    return {"model": m, "ids": ids, "loss_mask": mask, "topk_ids": i, "topk_logprobs": v}

def tail(lp):
    return torch.log1p(-lp.logsumexp(-1, keepdim=True).exp().clamp(max=1 - 1e-6))

def right(model, batch):
    s = torch.log_softmax(model(batch["ids"]), -1).gather(-1, batch["topk_ids"]); t = batch["topk_logprobs"]
    s, t = torch.cat([s, tail(s)], -1), torch.cat([t, tail(t)], -1)
    kl = (t.exp() * (t - s)).sum(-1)
    return (kl * batch["loss_mask"]).sum() / batch["loss_mask"].sum()

if __name__ == "__main__":
    b = make(0); m = b.pop("model"); l = right(m, b); l.backward(); p = torch.softmax(m(b["ids"]), -1); ref = 0.0
    for r, k in b["loss_mask"].nonzero().tolist():
        q = b["topk_logprobs"][r, k].exp().tolist(); idx = b["topk_ids"][r, k].tolist(); s = [p[r, k, i].item() for i in idx]
        rest = sum(p[r, k, i].item() for i in range(31) if i not in idx); import math
        ref += sum(a * math.log(a / c) for a, c in zip(q + [1 - sum(q)], s + [rest]))
    ref /= b["loss_mask"].sum().item()
    print("loss", l.item(), "loop", ref, "grad", m.head.weight.grad.norm().item()); assert abs(l.item() - ref) < 1e-4
