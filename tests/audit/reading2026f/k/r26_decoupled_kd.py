"""DKD, decoupled knowledge distillation (Zhao et al. 2022). The KL is split into a binary target/non-target part and a part among the non-target classes
(the target logit is pushed to -inf); the second part is NOT multiplied by 1 - p_target, so the sum is not the ordinary KL."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "distillation"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "loss_mask": "1 where the token is trained, [rows, time]",
          "teacher_logits": "teacher logits for predicting ids[:, 1:], [rows, time-1, vocab], constant"}
SETTINGS = {"alpha": "weight of the target part, 1.0", "beta": "weight of the non-target part, 4.0", "temperature": "2.0; both parts are multiplied by T^2"}
NOTES = ("DKD on next-token targets ids[:, 1:]: mean over trained tokens of all rows; KL(teacher || student) in both parts. The target token's logit is masked with a large negative number on purpose. Teacher is constant. All parameters are used.")


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


def right(model, batch, alpha=1.0, beta=4.0, temperature=2.0):
    keep = batch["loss_mask"][:, 1:].bool()
    s, t = model(batch["ids"][:, :-1])[keep] / temperature, batch["teacher_logits"][keep] / temperature
    target = batch["ids"][:, 1:][keep][:, None]

    def binary(logits):
        lt = F.log_softmax(logits, -1).gather(1, target)
        return torch.cat([lt, torch.log1p(-lt.exp())], 1)

    def others(logits):
        return F.log_softmax(logits.scatter(1, target, -1e4), -1)

    tckd = F.kl_div(binary(s), binary(t), reduction="batchmean", log_target=True)
    nckd = F.kl_div(others(s), others(t), reduction="batchmean", log_target=True)
    return (alpha * tckd + beta * nckd) * temperature ** 2


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
    tot = full = 0.0
    for i, t in where:
        q, p = torch.softmax(S[i, t] / 2, 0), torch.softmax(b["teacher_logits"][i, t] / 2, 0)
        y = b["ids"][i, t + 1].item(); o = [k for k in range(23) if k != y]
        bin_ = p[y] * torch.log(p[y] / q[y]) + (1 - p[y]) * torch.log((1 - p[y]) / (1 - q[y]))
        ph, qh = p[o] / p[o].sum(), q[o] / q[o].sum()
        nt = (ph * torch.log(ph / qh)).sum()
        tot = tot + 4 * (bin_ + 4 * nt)
        full = full + (bin_ + (1 - p[y]) * nt - (p * torch.log(p / q)).sum()).abs().item()
    check(right(m, b), tot / len(where), m)
    print("identity KL = TCKD + (1 - p_y) NCKD holds up to", full)
