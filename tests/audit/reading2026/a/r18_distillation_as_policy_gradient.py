"""On-policy distillation in the form of a policy gradient: the log-ratio to the teacher is a detached reward.
The reverse KL per sampled token is -(log student - log teacher), used as advantage without gradient; the gradient goes through
log student of the sampled token only. The loss value says nothing (its gradient is what counts); the teacher's log-probability is
known only for the sampled token, not for the vocabulary. No baseline, no clipping, one update per sample."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "prompt and tokens sampled from the student itself, [rows, time]", "loss_mask": "1 for sampled tokens, [rows, time]",
          "teacher_logps": "teacher's log-probability of ids[:, 1:], a constant, [rows, time-1]"}
SETTINGS = {"coef": "weight of the reverse KL, 1.0"}
NOTES = "Score-function estimate of the reverse KL per token, mean over sampled tokens of all rows. The log-ratio is a constant for the gradient."

class TinyLM(nn.Module):
    """One causal attention layer; returns logits [rows, time, vocabulary]."""
    def __init__(self, vocab=32, dim=16, max_pos=128):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, dim), nn.Embedding(max_pos, dim)
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids, attention_mask=None, position_ids=None, document_ids=None):
        rows, time = ids.shape
        if position_ids is None:
            position_ids = torch.arange(time).expand(rows, time)
        x = self.emb(ids) + self.pos(position_ids)
        allowed = torch.ones(time, time, dtype=torch.bool).tril()[None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, :]
        if document_ids is not None:
            allowed = allowed & (document_ids[:, :, None] == document_ids[:, None, :])
        allowed = allowed | torch.eye(time, dtype=torch.bool)[None]
        scores = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        x = x + scores.masked_fill(~allowed, -1e9).softmax(-1) @ self.v(x)
        return self.head(x)

def token_logps(logits, ids):
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)

def make(seed):
    torch.manual_seed(seed)
    model, teacher = TinyLM(), TinyLM()
    ids = torch.randint(0, 32, (4, 14))
    mask = torch.zeros(4, 14)
    with torch.no_grad():
        for t in range(4, 14):
            ids[:, t] = torch.multinomial(model(ids[:, :t])[:, -1].softmax(-1), 1).squeeze(1)
        teacher_logps = token_logps(teacher(ids), ids)
    mask[:, 4:] = 1
    return {"model": model, "ids": ids, "loss_mask": mask, "teacher_logps": teacher_logps}

def right(model, batch, coef=1.0):
    logps = token_logps(model(batch["ids"]), batch["ids"])
    mask = batch["loss_mask"][:, 1:]
    advantage = -coef * (logps.detach() - batch["teacher_logps"])
    reverse_kl = -(advantage * mask).sum() / mask.sum()
    return -(advantage * logps * mask).sum() / mask.sum(), {"reverse_kl": reverse_kl}

def grads(fn):
    d = make(0)
    model = d.pop("model")
    out = fn(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

if __name__ == "__main__":
    loss, grad = grads(right)
    d = make(0)
    model, params = d["model"], list(d["model"].parameters())
    total = [torch.zeros_like(p) for p in params]
    logps = token_logps(model(d["ids"]), d["ids"])
    for r in range(4):
        for t in range(3, 13):
            g = torch.autograd.grad(logps[r, t], params, retain_graph=True)
            w = (logps[r, t].item() - d["teacher_logps"][r, t].item()) / 40
            total = [a + w * b for a, b in zip(total, g)]
    slow = torch.cat([t.flatten() for t in total])
    print("loss", loss, "gradient difference to the explicit sum", (slow - grad).norm().item(), "norm", grad.norm().item())
    assert (slow - grad).norm() < 1e-4 and grad.norm() > 0
