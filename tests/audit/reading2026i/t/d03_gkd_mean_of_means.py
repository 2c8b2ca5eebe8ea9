"""GKD averages micro-batch token means instead of taking a global token mean. modelscope/ms-swift#10076, https://github.com/modelscope/ms-swift/issues/10076, 2026.
Full-vocabulary reverse-KL distillation divided the loss by the number of valid tokens inside each micro-batch, and the
scheduler then averaged micro-batches equally. A token's weight became 1/(M * N_mb): with micro-batches of one row,
tokens of short responses weigh far more than tokens of long ones. The loss looks healthy."""
import torch
import torch.nn as nn
import torch.nn.functional as F
FAMILY = "sharding and reductions"
KIND = "update"
INPUTS = {"batches": "micro-batches of one optimizer step; each has ids [rows, time], loss_mask (1 where logits at t are distilled), teacher_logits [rows, time, vocab]"}
SETTINGS = {}
NOTES = ("Intended objective: reverse KL(student || teacher) summed over all distilled tokens of all micro-batches, divided by their number. "
         "teacher_logits are constants. Number of micro-batches is free. One optimizer step per call; SGD.")

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
    batches = []
    for n in (3, 14, 6, 9):
        ids = torch.randint(0, 31, (1, 18))
        mask = torch.zeros(1, 18); mask[:, 2:2 + n] = 1
        with torch.no_grad():
            t = 2 * teacher(ids)
        batches.append({"ids": ids, "loss_mask": mask, "teacher_logits": t})
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": batches}

def gkd_sum(model, b):
    s, t = torch.log_softmax(model(b["ids"]), -1), torch.log_softmax(b["teacher_logits"], -1)
    kl = (s.exp() * (s - t)).sum(-1)
    return (kl * b["loss_mask"]).sum(), b["loss_mask"].sum()

def broken(model, optimizer, batches):
    optimizer.zero_grad()
    for b in batches:
        total, n = gkd_sum(model, b)
        (total / n.clamp(min=1) / len(batches)).backward()
    optimizer.step()

def right(model, optimizer, batches):
    optimizer.zero_grad()
    tokens = sum(b["loss_mask"].sum() for b in batches).clamp(min=1)
    for b in batches:
        total, _ = gkd_sum(model, b)
        (total / tokens).backward()
    optimizer.step()

if __name__ == "__main__":
    res = []
    for f in (broken, right):
        d = make(0); f(d["model"], d["optimizer"], d["batches"])
        res.append(torch.cat([p.grad.flatten() for p in d["model"].parameters()]))
    cos = F.cosine_similarity(res[0], res[1], dim=0).item()
    print("grad norms", res[0].norm().item(), res[1].norm().item(), "cosine", cos)
    d = make(0); m = d["model"]
    cat = {k: torch.cat([b[k] for b in d["batches"]]) for k in d["batches"][0]}
    s, n = gkd_sum(m, cat); (s / n).backward()
    ref = torch.cat([p.grad.flatten() for p in m.parameters()])
    assert torch.allclose(ref, res[1], atol=1e-6) and not torch.allclose(ref, res[0], atol=1e-3)
