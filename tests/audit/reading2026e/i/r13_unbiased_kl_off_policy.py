"""DeepSeek-V3.2 (2025): the k3 KL estimate is multiplied by the importance ratio pi/pi_old, with gradient through BOTH, because the
tokens came from pi_old and the plain k3 loss has a biased gradient. Looks like the ratio was applied twice by mistake."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "loss_mask": "1 where the target ids[:, 1:] is a completion token, [rows, time-1]",
          "old_logps": "log probabilities under the sampling policy, [rows, time-1], constant", "ref_logps": "log probabilities under the frozen reference, [rows, time-1], constant", "advantages": "one advantage per row, [rows], constant"}
SETTINGS = {"clip": "PPO clip, 0.2", "beta": "KL weight, 0.05"}
NOTES = "Mean over tokens of a row, then over rows. The ratio of the KL term is not clipped. old_logps, ref_logps and advantages are constants. In expectation over pi_old the gradient of the KL term is that of KL(pi || ref). All parameters used."
import torch
import torch.nn as nn
import torch.nn.functional as F


class Tiny(nn.Module):
    """Causal language model: ids [rows, time] -> logits [rows, time, vocabulary]."""
    def __init__(self, vocab=31, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def logps(model, ids):
    """log p(ids[:, t+1] | ids[:, :t+1]): [rows, time-1]."""
    return model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def fake_rows(g, rows, time=10, prompt=3, vocab=31):
    """Right-padded ids (pad = 0) and the mask [rows, time-1] of the targets ids[:, 1:] that belong to the completion."""
    ids = torch.randint(1, vocab, (rows, time), generator=g)
    n = torch.randint(2, time - prompt + 1, (rows,), generator=g)
    pos = torch.arange(time)
    ids[pos >= (prompt + n)[:, None]] = 0
    mask = ((pos >= prompt) & (pos < (prompt + n)[:, None])).float()
    return ids, mask[:, 1:]

def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    model = Tiny()
    ids, mask = fake_rows(g, 6)
    with torch.no_grad():
        old, ref = logps(model, ids), logps(Tiny(), ids)
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logps": (old + 0.2 * torch.randn(old.shape, generator=g)) * mask, "ref_logps": ref * mask, "advantages": torch.randn(6, generator=g)}


def right(model, batch, clip=0.2, beta=0.05):
    m, a = batch["loss_mask"], batch["advantages"][:, None]
    lp = logps(model, batch["ids"])
    r = ((lp - batch["old_logps"]) * m).exp()
    x = (batch["ref_logps"] - lp) * m
    kl = r * (torch.expm1(x) - x)
    per_token = -torch.minimum(r * a, r.clamp(1 - clip, 1 + clip) * a) + beta * kl
    return ((per_token * m).sum(1) / m.sum(1).clamp(min=1)).mean(), {"kl": ((kl * m).sum() / m.sum()).item()}


def check(loss, slow, model):
    assert torch.isfinite(loss) and abs(loss.item() - float(slow)) < 1e-4 * (1 + abs(float(slow))), (loss, slow)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    unused = [n for (n, _), v in zip(model.named_parameters(), grads) if v is None]
    norm = sum(float(v.norm()) ** 2 for v in grads if v is not None) ** 0.5
    assert norm > 0 and not unused, (norm, unused)
    print(f"ok  loss {loss.item():.6f}  slow {float(slow):.6f}  gradient norm {norm:.6f}")

if __name__ == "__main__":
    d = make(0); model = d.pop("model")
    lp, slow = logps(model, d["ids"]).detach().double(), 0.0
    for i in range(6):
        a, row = float(d["advantages"][i]), []
        for k in range(9):
            if d["loss_mask"][i, k]:
                r, q = float((lp[i, k] - d["old_logps"][i, k]).exp()), float((d["ref_logps"][i, k] - lp[i, k]).exp())
                row.append(-min(r * a, min(max(r, .8), 1.2) * a) + 0.05 * r * (q - 1 - float(torch.tensor(q).log())))
        slow += sum(row) / len(row) / 6
    check(right(model, d)[0], slow, model)
    # exact expectation over a small vocabulary: gradient of E_old[r k3] equals gradient of KL(pi||ref)
    z = torch.randn(7, requires_grad=True); po, pr = torch.randn(7).softmax(0), torch.randn(7).log_softmax(0)
    lp = z.log_softmax(0); e = (po * (lp - po.log()).exp() * ((pr - lp).exp() - 1 - (pr - lp))).sum()
    g1, = torch.autograd.grad(e, z, retain_graph=True); g2, = torch.autograd.grad((lp.exp() * (lp - pr)).sum(), z)
    assert torch.allclose(g1, g2, atol=1e-5)
