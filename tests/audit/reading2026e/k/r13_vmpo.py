"""V-MPO (Song et al. 2019). Half of the samples (the worse half by advantage) are thrown away, the weights are a softmax ACROSS samples, and
temperature and KL multiplier are parameters trained by the same loss through their Lagrangian terms, with stop-gradients on alternate sides."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], every position after the first is an action (no padding)", "advantages": "advantage per action, [rows, time-1], constant",
          "old_logprobs": "full log-probabilities of the target (old) policy, [rows, time-1, vocab], constant"}
SETTINGS = {"eps_eta": "temperature constraint, 0.1", "eps_alpha": "KL constraint, 0.01"}
NOTES = ("V-MPO policy, temperature and KL terms; the value loss lives elsewhere. psi sums to one over the kept half, so the policy term is a sum "
         "(already normalised); the KL is a mean over all actions. log_eta and log_alpha are parameters of the model. All parameters are used.")


class VMPOPolicy(nn.Module):
    def __init__(self, vocab=13, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)
        self.log_eta = nn.Parameter(torch.tensor(0.0))
        self.log_alpha = nn.Parameter(torch.tensor(0.5))

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    model = VMPOPolicy()
    ids = torch.randint(0, 13, (5, 8), generator=g)
    with torch.no_grad():
        logits = model(ids[:, :-1])
    old = F.log_softmax(logits + 0.3 * torch.randn(logits.shape, generator=g), -1)
    return {"model": model, "ids": ids, "advantages": torch.randn(5, 7, generator=g), "old_logprobs": old}


def right(model, batch, eps_eta=0.1, eps_alpha=0.01):
    ids, old = batch["ids"], batch["old_logprobs"]
    logps = F.log_softmax(model(ids[:, :-1]), -1)
    logp = logps.gather(-1, ids[:, 1:, None]).flatten()
    eta, alpha = model.log_eta.exp(), model.log_alpha.exp()
    top_adv, top = batch["advantages"].flatten().topk(logp.numel() // 2)
    psi = torch.softmax(top_adv / eta, 0).detach()
    loss_pi = -(psi * logp[top]).sum()
    loss_eta = eta * eps_eta + eta * (torch.logsumexp(top_adv / eta, 0) - torch.log(torch.tensor(float(len(top)))))
    kl = (old.exp() * (old - logps)).sum(-1).mean()
    loss_alpha = alpha * (eps_alpha - kl.detach()) + alpha.detach() * kl
    return loss_pi + loss_eta + loss_alpha


def check(loss, slow, model, tol=2e-5):
    """same value and same gradient as the explicit version; every parameter is used"""
    params = list(model.parameters())
    a = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    b = torch.autograd.grad(slow, params, retain_graph=True, allow_unused=True)
    assert all(x is not None for x in a), "unused parameter"
    b = [torch.zeros_like(p) if x is None else x for x, p in zip(b, params)]
    norm = torch.sqrt(sum((x ** 2).sum() for x in a)).item()
    diff = max((x - y).abs().max().item() for x, y in zip(a, b))
    print(f"loss {loss.item():.6f}  slow {slow.item():.6f}  grad norm {norm:.5f}  max grad diff {diff:.1e}")
    assert abs(loss.item() - slow.item()) < tol * max(1, abs(slow.item())) and diff < tol * max(1, norm) and norm > 1e-4


if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    P = F.log_softmax(m(b["ids"][:, :-1]), -1)
    S = sorted(((b["advantages"][i, t].item(), P[i, t, b["ids"][i, t + 1]]) for i in range(5) for t in range(7)), key=lambda x: -x[0])[:17]
    eta, al = m.log_eta.exp(), m.log_alpha.exp()
    z = sum(torch.exp(a / eta) for a, _ in S)
    pi = -sum((torch.exp(a / eta) / z).item() * l for a, l in S)
    kl = sum(F.kl_div(P[i, t], b["old_logprobs"][i, t].exp(), reduction="sum") for i in range(5) for t in range(7)) / 35
    slow = pi + 0.1 * eta + eta * torch.log(z / 17) + al * (0.01 - kl.item()) + al.item() * kl
    check(right(m, b), slow, m)
