"""ORPO (Hong et al. 2024). No reference model; the preference term compares log-odds of the length-AVERAGED sequence probability, and the
NLL of the chosen completion is part of the same loss."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "preference"
KIND = "loss"
INPUTS = {"chosen_ids": "token ids of prompt + preferred completion, [pairs, time], right-padded with 0", "rejected_ids": "the same for the other completion",
          "chosen_mask": "1 where the token belongs to the completion, [pairs, time]", "rejected_mask": "the same for the rejected one",}
SETTINGS = {"lam": "weight of the odds-ratio term, 0.1"}
NOTES = ("ORPO: mean over all chosen completion tokens of the NLL + lam * mean over pairs of -log sigmoid(log odds chosen - log odds rejected). Average log-probabilities are below 0, so log(1 - exp(.)) is finite. Two different reductions on purpose. All parameters are used.")


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
    return {"model": model, "chosen_ids": c, "rejected_ids": r, "chosen_mask": cm, "rejected_mask": rm}


def right(model, batch, lam=0.1):
    means, sums, counts = [], [], []
    for side in ("chosen", "rejected"):
        mask = batch[side + "_mask"][:, 1:]
        total = (token_logps(model, batch[side + "_ids"]) * mask).sum(1)
        sums.append(total); counts.append(mask.sum(1)); means.append(total / mask.sum(1))
    nll = -sums[0].sum() / counts[0].sum()
    log_odds = (means[0] - means[1]) - (torch.log1p(-torch.exp(means[0])) - torch.log1p(-torch.exp(means[1])))
    return nll - lam * F.logsigmoid(log_odds).mean()


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
    C, R = token_logps(m, b["chosen_ids"]), token_logps(m, b["rejected_ids"])
    nll, n, pref = 0.0, 0, 0.0
    for i in range(6):
        c, r = C[i][b["chosen_mask"][i, 1:].bool()], R[i][b["rejected_mask"][i, 1:].bool()]
        nll, n = nll - c.sum(), n + len(c)
        pc, pr = c.mean().exp(), r.mean().exp()
        pref = pref - torch.log(torch.sigmoid(torch.log((pc / (1 - pc)) / (pr / (1 - pr))))) / 6
    check(right(m, b), nll / n + 0.1 * pref, m)
