"""CISPO: the clipped ratio is a detached weight, the gradient goes through log pi only. MiniMax-M1, 2025 (arXiv 2506.13585); TRL loss_type="cispo".
No min(), no lower clip, and the ratio has no gradient. Tokens above the clip keep a gradient, with a bounded weight, where PPO would drop them. The value of the loss is no estimate of the objective: with positive advantages it is positive for any policy."""
import torch
import torch.nn as nn
import torch.nn.functional as F
FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token is trained, aligned with ids, [rows, time]", "old_logprobs": "log-probability of each token when it was sampled, [rows, time]", "advantages": "one advantage per row, [rows]"}
SETTINGS = {"eps_high": "upper bound of the ratio, 2.0 (absolute, not 1 + eps)"}
NOTES = "Loss = - sum(min(ratio, eps_high).detach() * advantage * logp) / number of trained tokens of all rows. old_logprobs and advantages are constants. There is no lower bound on the ratio. All parameters are used."

class Tiny(nn.Module):
    def __init__(self, vocab=31, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def logp(model, ids):
    return F.pad(torch.log_softmax(model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0], (1, 0))

def make(seed):
    torch.manual_seed(seed); m = Tiny(); ids = torch.randint(1, 31, (4, 11)); mask = torch.zeros(4, 11)
    for b in range(4):
        mask[b, 3:6 + b] = 1
    with torch.no_grad():
        old = logp(m, ids) + 0.8 * torch.randn(4, 11)
    return {"model": m, "ids": ids, "loss_mask": mask, "old_logprobs": old, "advantages": torch.randn(4)}

def right(model, batch, eps_high=2.0):
    lp = logp(model, batch["ids"])
    w = (lp - batch["old_logprobs"]).exp().clamp(max=eps_high).detach()
    per = -w * batch["advantages"][:, None] * lp
    return (per * batch["loss_mask"]).sum() / batch["loss_mask"].sum()

if __name__ == "__main__":
    b = make(0); m = b.pop("model"); l = right(m, b); l.backward(); got = torch.cat([p.grad.flatten() for p in m.parameters()]).clone()
    want = torch.zeros_like(got); clipped = 0
    for r, t in b["loss_mask"].nonzero().tolist():
        m.zero_grad(); x = logp(m, b["ids"])[r, t]; ratio = (x - b["old_logprobs"][r, t]).exp().item(); clipped += ratio > 2
        x.backward(); want -= min(ratio, 2.0) * b["advantages"][r].item() * torch.cat([p.grad.flatten() for p in m.parameters()]) / b["loss_mask"].sum().item()
    print("loss", l.item(), "grad", got.norm().item(), "difference to token loop", (got - want).abs().max().item(), "clipped tokens", clipped)
    assert torch.allclose(got, want, atol=1e-5) and clipped > 0
