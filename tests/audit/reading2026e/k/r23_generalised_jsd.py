"""Generalised JSD of GKD (Agarwal et al. 2024; TRL GKDTrainer). The mixture is built in log space with logsumexp, F.kl_div gets the MIXTURE as its
input and teacher or student as target, and beta 0 and 1 are special cases (forward and reverse KL), since the formula itself gives 0 there."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "distillation"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "loss_mask": "1 where the token is trained, [rows, time]",
          "teacher_logits": "teacher logits for predicting ids[:, 1:], [rows, time-1, vocab], constant"}
SETTINGS = {"beta": "weight of the teacher in the mixture, 0.3; 0 means KL(teacher || student), 1 means KL(student || teacher)", "temperature": "0.9, no T^2 factor"}
NOTES = ("Generalised JSD: sum over the vocabulary, mean over trained tokens of all rows. beta * KL(teacher || mix) + (1 - beta) * KL(student || mix) with mix = beta * teacher + (1 - beta) * student; the gradient flows also through the mixture. Teacher is constant. All parameters are used.")


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
    ids, mask = make_ids(g, 6, 10)
    teacher = 1.5 * torch.randn(6, 9, 23, generator=g)
    return {"model": model, "ids": ids, "loss_mask": mask, "teacher_logits": teacher}


def right(model, batch, beta=0.3, temperature=0.9):
    keep = batch["loss_mask"][:, 1:].bool()
    s = F.log_softmax(model(batch["ids"][:, :-1])[keep] / temperature, -1)
    t = F.log_softmax(batch["teacher_logits"][keep] / temperature, -1)
    if beta == 0:
        return F.kl_div(s, t, reduction="batchmean", log_target=True)
    if beta == 1:
        return F.kl_div(t, s, reduction="batchmean", log_target=True)
    b = torch.tensor(beta)
    mix = torch.logsumexp(torch.stack([s + torch.log1p(-b), t + torch.log(b)]), 0)
    return b * F.kl_div(mix, t, reduction="batchmean", log_target=True) + (1 - b) * F.kl_div(mix, s, reduction="batchmean", log_target=True)


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
    S = m(b["ids"][:, :-1])
    where = [(i, t) for i in range(6) for t in range(9) if b["loss_mask"][i, t + 1]]
    for beta in (0.3, 0.0, 1.0):
        tot = 0.0
        for i, t in where:
            q, p = torch.softmax(S[i, t] / 0.9, 0), torch.softmax(b["teacher_logits"][i, t] / 0.9, 0)
            x = beta * p + (1 - beta) * q
            kl = lambda u, v: (u * torch.log(u / v)).sum()
            tot = tot + (kl(p, q) if beta == 0 else kl(q, p) if beta == 1 else beta * kl(p, x) + (1 - beta) * kl(q, x))
        check(right(m, b, beta=beta), tot / len(where), m)
