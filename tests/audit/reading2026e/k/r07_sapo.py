"""SAPO, soft adaptive policy optimisation (Qwen, 2025). No clip: the ratio goes through a sigmoid gate 4/tau * sigmoid(tau(r-1)),
whose slope at r = 1 is exactly 1, and negative advantages get a steeper gate than positive ones."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "loss_mask": "1 where the token is a trained completion token, [rows, time]",
          "old_logps": "log-probabilities of ids[:, 1:] under the sampling policy, [rows, time-1], constant",
          "advantages": "one group-normalised advantage per row, [rows], constant"}
SETTINGS = {"tau_pos": "gate temperature for positive advantages, 1.0", "tau_neg": "gate temperature for the others, 1.05"}
NOTES = ("SAPO: mean over rows of the mean over the row's trained tokens of -gate(ratio) * advantage. At ratio 1 the gate has value 2/tau "
         "and slope 1, so the value of the loss differs from a PPO surrogate while the on-policy gradient agrees. All parameters are used.")


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
    ids, mask = make_ids(g, 8, 12)
    old = token_logps(model, ids).detach()
    old = old + 0.3 * torch.randn(old.shape, generator=g)
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logps": old, "advantages": torch.randn(8, generator=g)}


def right(model, batch, tau_pos=1.0, tau_neg=1.05):
    mask, adv = batch["loss_mask"][:, 1:], batch["advantages"][:, None]
    ratio = torch.exp(token_logps(model, batch["ids"]) - batch["old_logps"])
    tau = torch.where(adv > 0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return -((gate * adv * mask).sum(1) / mask.sum(1)).mean()


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
    lp, tot = token_logps(m, b["ids"]), 0.0
    for i in range(8):
        a, terms = b["advantages"][i].item(), []
        tau = 1.0 if a > 0 else 1.05
        for t in range(lp.shape[1]):
            if b["loss_mask"][i, t + 1]:
                r = torch.exp(lp[i, t] - b["old_logps"][i, t])
                terms.append(4 / tau / (1 + torch.exp(-tau * (r - 1))) * a)
        tot = tot - sum(terms) / len(terms) / 8
    check(right(m, b), tot, m)
    b["old_logps"] = token_logps(m, b["ids"]).detach()     # on-policy: gradient of plain REINFORCE
    k = b["loss_mask"][:, 1:]
    pg = -((token_logps(m, b["ids"]) * b["advantages"][:, None] * k).sum(1) / k.sum(1)).mean()
    d = [(x - y).abs().max().item() for x, y in zip(torch.autograd.grad(right(m, b), list(m.parameters())), torch.autograd.grad(pg, list(m.parameters())))]
    print("on-policy gradient difference to REINFORCE", max(d)); assert max(d) < 1e-6
