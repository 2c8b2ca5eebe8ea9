"""KL penalty with the value of k3 and the gradient of k2 (straight-through, the 'k3+' of verl; Tang & Munos 2025, Liu et al. 2025). k3's own gradient is NOT that of the reverse KL; k2's is, on policy, so the forward value and the backward come from two estimators."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], sampled from the present policy", "loss_mask": "1 where the token is trained, [rows, time]",
          "ref_logps": "log-probs of the reference policy for ids[:, 1:], [rows, time-1]", "advantages": "one per row, [rows]"}
SETTINGS = {"beta": "KL coefficient, 0.1"}
NOTES = ("On-policy REINFORCE plus KL; mean over the trained tokens of all rows. ref_logps and advantages constants. "
         "The gradient of the loss differs from the derivative of its value by intent (a finite difference check of the KL term fails).")
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
    ref = token_logps(model, ids).detach() + 0.3 * torch.randn(ids.shape[0], ids.shape[1] - 1)
    return {"model": model, "ids": ids, "loss_mask": mask, "ref_logps": ref, "advantages": torch.randn(ids.shape[0])}


def kl_term(lp, ref):
    d = ref - lp
    k3 = d.exp() - d - 1
    k2 = 0.5 * d.square()
    return k3.detach() + (k2 - k2.detach())


def right(model, batch, beta=0.1):
    lp = token_logps(model, batch["ids"])
    m = batch["loss_mask"][:, 1:]
    pg = -batch["advantages"][:, None] * lp
    return ((pg + beta * kl_term(lp, batch["ref_logps"])) * m).sum() / m.sum()


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    g = flat_grad(model, right(model, b))
    # exact check: expectation over all actions of grad(kl_term) is the gradient of the reverse KL
    torch.manual_seed(1)
    z = torch.randn(7, dtype=torch.double, requires_grad=True); ref = torch.randn(7, dtype=torch.double).log_softmax(0)
    lp = z.log_softmax(0); p = lp.exp()
    est, = torch.autograd.grad((p.detach() * kl_term(lp, ref)).sum(), z, retain_graph=True)
    true, = torch.autograd.grad((p * (lp - ref)).sum(), z, retain_graph=True)
    d = ref - lp
    naive, = torch.autograd.grad((p.detach() * (d.exp() - d - 1)).sum(), z)
    value = (p * kl_term(lp, ref)).sum()
    assert torch.allclose(est, true) and not torch.allclose(naive, true) and torch.allclose(value, (p * (lp - ref)).sum()) and g.norm() > 0
    print("grad error k3+", (est - true).abs().max().item(), "plain k3", (naive - true).abs().max().item(), "grad", g.norm().item())
