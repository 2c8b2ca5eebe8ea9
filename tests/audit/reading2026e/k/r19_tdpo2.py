"""TDPO2, token-level DPO (Zeng et al. 2024). DPO minus alpha times the difference of two sequence KLs (reference first), of which the one of
the CHOSEN completion is detached and the one of the rejected completion is not: the asymmetry is the method."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "preference"
KIND = "loss"
INPUTS = {"chosen_ids": "token ids of prompt + preferred completion, [pairs, time], right-padded with 0", "rejected_ids": "the same for the other completion",
          "chosen_mask": "1 where the token belongs to the completion, [pairs, time]", "rejected_mask": "the same for the rejected one",
          "ref_chosen_logits": "reference logits for predicting chosen_ids[:, 1:], [pairs, time-1, vocab], constant", "ref_rejected_logits": "the same for rejected_ids"}
SETTINGS = {"beta": "0.1", "alpha": "weight of the sequence KL difference, 0.5"}
NOTES = ("TDPO2: mean over pairs of -log sigmoid(beta * (margin - alpha * (KL_rejected - sg(KL_chosen)))); sums over completion tokens, no length normaliser. Reference logits are constants. All parameters are used.")


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
    ref = [(lambda x: x + 0.5 * torch.randn(x.shape, generator=g))(model(x[:, :-1]).detach()) for x in (c, r)]
    return {"model": model, "chosen_ids": c, "rejected_ids": r, "chosen_mask": cm, "rejected_mask": rm,
            "ref_chosen_logits": ref[0], "ref_rejected_logits": ref[1]}


def margin_and_kl(model, batch, side):
    ids, mask = batch[side + "_ids"], batch[side + "_mask"][:, 1:]
    logps = F.log_softmax(model(ids[:, :-1]), -1)
    ref = F.log_softmax(batch["ref_" + side + "_logits"], -1)
    margin = (logps - ref).gather(-1, ids[:, 1:, None]).squeeze(-1)
    kl = (ref.exp() * (ref - logps)).sum(-1)
    return (margin * mask).sum(1), (kl * mask).sum(1)


def right(model, batch, beta=0.1, alpha=0.5):
    mc, kc = margin_and_kl(model, batch, "chosen")
    mr, kr = margin_and_kl(model, batch, "rejected")
    logits = (mc - mr) - alpha * (kr - kc.detach())
    return -F.logsigmoid(beta * logits).mean()


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
    def parts(side, i):
        x, mk = b[side + "_ids"][i], b[side + "_mask"][i]
        P, Q = torch.softmax(m(x[None, :-1])[0], -1), torch.softmax(b["ref_" + side + "_logits"][i], -1)
        T = [t for t in range(len(x) - 1) if mk[t + 1]]
        return sum(torch.log(P[t, x[t + 1]] / Q[t, x[t + 1]]) for t in T), sum((Q[t] * torch.log(Q[t] / P[t])).sum() for t in T)
    tot = 0.0
    for i in range(6):
        (mc, kc), (mr, kr) = parts("chosen", i), parts("rejected", i)
        tot = tot + torch.log(1 + torch.exp(-0.1 * (mc - mr - 0.5 * kr + 0.5 * kc.item()))) / 6
    check(right(m, b), tot, m)
