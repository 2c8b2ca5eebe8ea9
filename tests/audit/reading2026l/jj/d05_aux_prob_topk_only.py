"""Load-balance loss averages the router probability over chosen experts only. paiml/aprender#2162, https://github.com/paiml/aprender/pull/2162, 2026.
The Switch/Mixtral balancing loss is E * sum f_e P_e with P_e the mean of the full router softmax over all tokens. The code added the probability of an
expert only for the tokens that had the expert in their top-k, so P_e was too small and the gradient for the experts that a token did not choose was missing."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "mixture of experts"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "mask": "1 for real tokens, 0 for padding, [rows, time]"}
SETTINGS = {"alpha": "weight of the balancing loss, 0.05", "k": "experts per token, 2"}
NOTES = ("Next-token cross entropy, mean over all real targets of all rows (logits at t predict the token at t+1), plus alpha * E * sum_e f_e * P_e (Switch Transformer / Mixtral). "
         "f_e is the part of the top-k assignments of the real tokens that go to expert e (sums to 1, constant); P_e is the mean over all real tokens of the full softmax probability of expert e (sums to 1, with gradient). "
         "Balanced routing gives the value alpha. Padding tokens count in neither. Top-k gates are renormalised to sum to 1 in the forward pass. All parameters are used.")

class LM(nn.Module):
    def __init__(self, vocab=29, width=20, experts=5):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.router = nn.Linear(width, experts, bias=False)
        self.w = nn.Parameter(torch.randn(experts, width, width) / width ** 0.5)
        self.head = nn.Linear(width, vocab)
    def forward(self, ids, k):
        h = self.rnn(self.emb(ids))[0]
        probs = self.router(h * 4).softmax(-1)
        top, idx = probs.topk(k, -1)
        chosen = F.one_hot(idx, probs.shape[-1]).sum(-2).to(h.dtype)
        gate = probs * chosen / top.sum(-1, keepdim=True)
        y = torch.einsum("bte,btd,edf->btf", gate, h, self.w)
        return self.head(h + torch.tanh(y)), probs, chosen

def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(1, 29, (5, 11))
    mask = (torch.arange(11) < torch.tensor([11, 8, 6, 10, 9])[:, None]).float()
    return {"ids": ids * mask.long(), "mask": mask, "model": LM()}

def _ce(logits, batch):
    m = batch["mask"][:, 1:]
    nll = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten(), reduction="none").view(m.shape)
    return (nll * m).sum() / m.sum()

def broken(model, batch, alpha=0.05, k=2):
    logits, probs, chosen = model(batch["ids"], k)
    m = batch["mask"].unsqueeze(-1)
    n = m.sum()
    f = (chosen * m).sum((0, 1)) / (n * k)
    P = (probs * chosen * m).sum((0, 1)) / n
    return _ce(logits, batch) + alpha * probs.shape[-1] * (f.detach() * P).sum()

def right(model, batch, alpha=0.05, k=2):
    logits, probs, chosen = model(batch["ids"], k)
    m = batch["mask"].unsqueeze(-1)
    n = m.sum()
    f = (chosen * m).sum((0, 1)) / (n * k)
    P = (probs * m).sum((0, 1)) / n
    return _ce(logits, batch) + alpha * probs.shape[-1] * (f.detach() * P).sum()

if __name__ == "__main__":
    d = make(0); m = d.pop("model")
    out = {}
    for f in (broken, right):
        m.zero_grad(); l = f(m, d); l.backward(); out[f.__name__] = (l.item(), m.router.weight.grad.clone())
    print({k: (v[0], v[1].norm().item()) for k, v in out.items()}, "router gradient difference", (out["broken"][1] - out["right"][1]).norm().item())
    assert abs(out["broken"][0] - out["right"][0]) > 1e-4
