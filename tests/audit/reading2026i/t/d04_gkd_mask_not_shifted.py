"""GKD selects logits with labels that were not shifted. modelscope/ms-swift#8436, https://github.com/modelscope/ms-swift/pull/8436, 2026.
Logits at position t predict token t+1, but the mask was labels[t] != -100. So the first response token was never
distilled, and each response contributed the position after its last token (what follows the end), for which the
teacher has no meaning. The loss runs and falls."""
import torch
import torch.nn as nn
import torch.nn.functional as F
FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "labels": "ids where the token is part of the response, -100 elsewhere; aligned with ids (not shifted), [rows, time]",
          "teacher_logits": "teacher logits for the same ids, [rows, time, vocab]"}
SETTINGS = {"beta": "weight of the student in the mixture of the generalized JSD, 0.5"}
NOTES = ("Generalized Jensen-Shannon distillation; mean over the response tokens of all rows. Logits at t predict token t+1. "
         "teacher_logits are constants. All parameters are used.")

class Tiny(nn.Module):
    def __init__(self, vocab=31, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def make(seed):
    torch.manual_seed(seed)
    model, teacher = Tiny(), Tiny()
    ids = torch.randint(1, 31, (4, 14)); labels = torch.full_like(ids, -100)
    for b in range(4):
        p = int(torch.randint(3, 6, (1,))); n = int(torch.randint(3, 8, (1,)))
        labels[b, p:p + n] = ids[b, p:p + n]
    with torch.no_grad():
        t = 2 * teacher(ids)
    return {"model": model, "ids": ids, "labels": labels, "teacher_logits": t}

def jsd(s, t, beta):
    s, t = torch.log_softmax(s, -1), torch.log_softmax(t, -1)
    m = torch.logsumexp(torch.stack([s + torch.log(torch.tensor(beta)), t + torch.log(torch.tensor(1 - beta))]), 0)
    return beta * (s.exp() * (s - m)).sum(-1) + (1 - beta) * (t.exp() * (t - m)).sum(-1)

def broken(model, batch, beta=0.5):
    mask = batch["labels"] != -100
    s, t = model(batch["ids"])[mask], batch["teacher_logits"][mask]
    return jsd(s, t, beta).sum() / mask.sum().clamp(min=1)

def right(model, batch, beta=0.5):
    labels = torch.roll(batch["labels"], -1, 1)
    labels[:, -1] = -100
    mask = labels != -100
    s, t = model(batch["ids"])[mask], batch["teacher_logits"][mask]
    return jsd(s, t, beta).sum() / mask.sum().clamp(min=1)

if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    gr = []
    for f in (broken, right):
        m.zero_grad(); l = f(m, b); l.backward(); gr.append(torch.cat([p.grad.flatten() for p in m.parameters()]))
        print(f.__name__, l.item(), gr[-1].norm().item())
    assert (gr[0] - gr[1]).norm() > 1e-3
