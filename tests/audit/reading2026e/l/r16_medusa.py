"""Multi-token prediction with decaying head weights (Medusa). Head k reads the state at t and predicts token t + 1 + k: targets
are shifted by more than one on purpose. Every head has its own number of targets, and the extra heads weigh 0.8 ** k."""
FAMILY = "multi-task"
KIND = "loss"
INPUTS = {"ids": "token ids, padding 0, [rows, time]", "loss_mask": "1 where the token is trained, [rows, time]"}
SETTINGS = {"decay": "weight of head k is decay ** k, 0.8"}
NOTES = ("Reduction: for each head the mean over its own trained targets of all rows, then a weighted sum over heads (not divided by "
         "the sum of weights). Supervised, several heads; every parameter is used. Rows must be longer than the number of heads.")
import torch
import torch.nn as nn
import torch.nn.functional as F


class Heads(nn.Module):
    def __init__(self, vocab=24, width=16, heads=3):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.heads = nn.ModuleList(nn.Linear(width, vocab) for _ in range(heads))

    def forward(self, ids):
        h = self.rnn(self.emb(ids))[0]
        return [head(h) for head in self.heads]


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
    ids, mask = random_rows()
    return {"ids": ids, "loss_mask": mask, "model": Heads()}


def right(model, batch, decay=0.8):
    ids, mask = batch["ids"], batch["loss_mask"]
    loss = 0.0
    for k, logits in enumerate(model(ids)):
        ahead = k + 1
        ce = F.cross_entropy(logits[:, :-ahead].transpose(1, 2), ids[:, ahead:], reduction="none")
        m = mask[:, ahead:]
        loss = loss + decay ** k * (ce * m).sum() / m.sum().clamp(min=1.0)
    return loss


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
    want = 0.0
    for k, lo in enumerate(m(d["ids"])):
        l = [-float(lo[i, j - 1 - k].log_softmax(-1)[d["ids"][i, j]]) for i in range(6) for j in range(k + 1, 12) if d["loss_mask"][i, j] > 0]
        want += 0.8 ** k * sum(l) / len(l)
    check(right(m, d), m, want)
