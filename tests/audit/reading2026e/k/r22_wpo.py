"""WPO, weighted preference optimisation (Zhou et al. 2024; TRL use_weighting). Each pair's DPO loss is multiplied by a detached weight made of the
policy's own mean token log-probabilities, each first divided by sum of p^2 (sampled alignment), clamped to at most 1."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "preference"
KIND = "loss"
INPUTS = {"chosen_ids": "token ids of prompt + preferred completion, [pairs, time], right-padded with 0", "rejected_ids": "the same for the other completion",
          "chosen_mask": "1 where the token belongs to the completion, [pairs, time]", "rejected_mask": "the same for the rejected one",
          "ref_chosen_logps": "log-probabilities of chosen_ids[:, 1:] under the reference, [pairs, time-1], constant", "ref_rejected_logps": "the same for rejected_ids"}
SETTINGS = {"beta": "0.3"}
NOTES = ("WPO: mean over pairs of weight * DPO loss; weights are constants (no gradient) and are not normalised to mean 1. DPO margins are sums, weights are length averages. All parameters are used.")


class TinyLM(nn.Module):
    """embedding -> GRU (causal by nature) -> vocabulary"""
    def __init__(self, vocab=23, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])          # [rows, time, vocab]


def token_logps(model, ids):
    """log p(ids[:, t+1] | ids[:, :t+1]), [rows, time-1]"""
    logp = F.log_softmax(model(ids[:, :-1]).float(), -1)
    return logp.gather(-1, ids[:, 1:, None]).squeeze(-1)


def make_ids(g, rows, time, vocab=23, prompt=3):
    """prompts of 3 tokens, completions of random length, 0 = padding on the right"""
    lengths = torch.randint(prompt + 2, time + 1, (rows,), generator=g)
    pos = torch.arange(time)[None]
    ids = torch.randint(1, vocab, (rows, time), generator=g) * (pos < lengths[:, None])
    mask = ((pos >= prompt) & (pos < lengths[:, None])).float()
    return ids, mask


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    model = TinyLM()
    c, cm = make_ids(g, 6, 12); r, rm = make_ids(g, 6, 12)
    r[:, :3] = c[:, :3]
    refs = [(lambda x: x + 0.4 * torch.randn(x.shape, generator=g))(token_logps(model, x).detach()) for x in (c, r)]
    return {"model": model, "chosen_ids": c, "rejected_ids": r, "chosen_mask": cm, "rejected_mask": rm,
            "ref_chosen_logps": refs[0], "ref_rejected_logps": refs[1]}


def log_ratio(model, batch, side):
    """sum over the completion of log pi - log ref, [pairs]"""
    diff = token_logps(model, batch[side + "_ids"]) - batch["ref_" + side + "_logps"]
    return (diff * batch[side + "_mask"][:, 1:]).sum(1)


@torch.no_grad()
def log_weight(model, ids, mask):
    logps = F.log_softmax(model(ids[:, :-1]), -1)
    token = logps.gather(-1, ids[:, 1:, None]).squeeze(-1)
    adjusted = token - torch.logsumexp(2 * logps, -1)             # log p(token) - log sum p^2
    return (adjusted * mask[:, 1:]).sum(1) / mask[:, 1:].sum(1)


def right(model, batch, beta=0.3):
    z = beta * (log_ratio(model, batch, "chosen") - log_ratio(model, batch, "rejected"))
    weight = torch.exp(sum(log_weight(model, batch[s + "_ids"], batch[s + "_mask"]) for s in ("chosen", "rejected"))).clamp(max=1)
    return (-F.logsigmoid(z) * weight).mean(), {"weight": weight.mean().item()}


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
    z = 0.3 * (log_ratio(m, b, "chosen") - log_ratio(m, b, "rejected"))
    tot = 0.0
    for i in range(6):
        w = 1.0
        for s in ("chosen", "rejected"):
            x = b[s + "_ids"][i]; P = torch.softmax(m(x[None, :-1])[0], -1).detach()
            q = [P[t, x[t + 1]] / (P[t] ** 2).sum() for t in range(11) if b[s + "_mask"][i, t + 1]]
            w *= float(torch.prod(torch.stack(q))) ** (1 / len(q))
        tot = tot + torch.log(1 + torch.exp(-z[i])) * min(1.0, w) / 6
    loss, metrics = right(m, b); print(metrics)
    check(loss, tot, m)
