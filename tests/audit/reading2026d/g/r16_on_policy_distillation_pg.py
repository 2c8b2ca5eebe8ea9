"""On-policy distillation as a policy gradient (Thinking Machines 2025). The 'advantage' of each token is teacher log-prob minus SAMPLER log-prob: there is no reward, no discount, no baseline; its expected gradient is that of the per-token reverse KL."""
FAMILY = "distillation"
KIND = "loss"
INPUTS = {"ids": "sampled by the student, [rows, time]", "loss_mask": "1 on sampled tokens", "sampler_logps": "log-probs at sampling, [rows, time-1]", "teacher_logps": "teacher's log-probs of the same tokens, [rows, time-1]"}
SETTINGS = {"coef": "scale of the reverse KL, 1.0"}
NOTES = "Policy gradient with an unclipped ratio; mean over trained tokens of all rows. sampler_logps, teacher_logps constants, hence the advantage too. The value of the loss estimates the KL only on policy."
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

V, D = 23, 16


class Tiny(nn.Module):
    """Causal recurrent model: ids [rows, time] -> logits [rows, time, V]."""

    def __init__(self, out=V):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.rnn = nn.GRU(D, D, batch_first=True)
        self.head = nn.Linear(D, out, bias=False)

    def hidden(self, ids):
        return self.rnn(self.emb(ids))[0]

    def forward(self, ids):
        return self.head(self.hidden(ids))


def token_logps(model, ids):
    """log p(ids[:, t+1] | ids[:, :t+1]), shape [rows, time-1]."""
    lp = F.log_softmax(model(ids)[:, :-1].float(), dim=-1)
    return lp.gather(-1, ids[:, 1:, None]).squeeze(-1)


def base_rows(seed, rows=6, time=10, prompt=3):
    torch.manual_seed(seed)
    model = Tiny()
    ids = torch.randint(1, V, (rows, time))
    length = torch.randint(prompt + 2, time + 1, (rows, 1))
    pos = torch.arange(time)[None]
    ids = ids.masked_fill(pos >= length, 0)
    loss_mask = ((pos >= prompt) & (pos < length)).float()
    return model, ids, loss_mask


def flat_grad(model, loss):
    params = list(model.parameters())
    gs = torch.autograd.grad(loss, params, allow_unused=True, retain_graph=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in zip(params, gs)])


def make(seed):
    model, ids, mask = base_rows(seed)
    s = token_logps(model, ids).detach() + 0.05 * torch.randn(6, 9)
    return {"model": model, "ids": ids, "loss_mask": mask, "sampler_logps": s, "teacher_logps": s + 0.5 * torch.randn(6, 9)}


def right(model, batch, coef=1.0):
    lp = token_logps(model, batch["ids"]); m = batch["loss_mask"][:, 1:]
    adv = coef * (batch["teacher_logps"] - batch["sampler_logps"])
    return -((lp - batch["sampler_logps"]).exp() * adv * m).sum() / m.sum()


if __name__ == "__main__":
    b = make(0); model = b.pop("model"); g = flat_grad(model, right(model, b))
    # exact: all V continuations of one prompt, weighted with their probability
    prompt = b["ids"][:1, :3].expand(V, 3); ids = torch.cat([prompt, torch.arange(V)[:, None]], 1)
    mask = torch.zeros(V, 4); mask[:, 3] = 1
    lp = token_logps(model, ids); teacher = torch.randn(V).log_softmax(0)
    est = sum(lp[a, 2].exp().detach() * right(model, {"ids": ids[a:a + 1], "loss_mask": mask[a:a + 1], "sampler_logps": lp[a:a + 1].detach(),
              "teacher_logps": torch.cat([lp[a, :2].detach(), teacher[a:a + 1]])[None]}) for a in range(V))
    q = model(ids[:1, :3])[0, -1].log_softmax(0)
    kl = (q.exp() * (q - teacher)).sum()
    e, t = flat_grad(model, est), flat_grad(model, kl)
    assert torch.allclose(est, kl, atol=1e-5) and torch.allclose(e, t, atol=1e-5) and g.norm() > 0
    print("KL", kl.item(), "estimate", est.item(), "grad gap", (e - t).abs().max().item())
