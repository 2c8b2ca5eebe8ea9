"""GSPO (Zheng et al. 2025). The importance ratio is one number per row: the exponential of the MEAN log ratio over the row's
tokens, so it lives very near 1 and the clip range is 3e-4 / 4e-4 rather than 0.2. Looks like a typo of the clip; it is the paper's."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "loss_mask": "1 where the target ids[:, 1:] is a completion token, [rows, time-1]",
          "old_logps": "log probabilities of the targets under the sampling policy, [rows, time-1], constant", "advantages": "one advantage per row, [rows], constant"}
SETTINGS = {"clip_low": "lower clip distance of the sequence ratio, 3e-4", "clip_high": "upper clip distance, 4e-4"}
NOTES = "Mean over rows (each row weighs the same whatever its length, by design). Clipped surrogate, sequence level. old_logps and advantages are constants. All parameters used."
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
    ids, mask = fake_rows(g, 8)
    with torch.no_grad():
        old = logps(model, ids)
    old = (old + 6e-4 * torch.randn(old.shape, generator=g)) * mask
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logps": old, "advantages": torch.randn(8, generator=g)}


def right(model, batch, clip_low=3e-4, clip_high=4e-4):
    m, a = batch["loss_mask"], batch["advantages"]
    mean_log = ((logps(model, batch["ids"]) - batch["old_logps"]) * m).sum(1) / m.sum(1).clamp(min=1)
    s = mean_log.exp()
    loss = -torch.minimum(s * a, s.clamp(1 - clip_low, 1 + clip_high) * a).mean()
    return loss, {"clipped": ((s < 1 - clip_low) | (s > 1 + clip_high)).float().mean().item()}


def check(loss, slow, model):
    assert torch.isfinite(loss) and abs(loss.item() - float(slow)) < 1e-4 * (1 + abs(float(slow))), (loss, slow)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    unused = [n for (n, _), v in zip(model.named_parameters(), grads) if v is None]
    norm = sum(float(v.norm()) ** 2 for v in grads if v is not None) ** 0.5
    assert norm > 0 and not unused, (norm, unused)
    print(f"ok  loss {loss.item():.6f}  slow {float(slow):.6f}  gradient norm {norm:.6f}")

if __name__ == "__main__":
    d = make(0); model = d.pop("model")
    loss, info = right(model, d)
    lp, slow = logps(model, d["ids"]).detach(), 0.0
    for i in range(8):
        ks = [k for k in range(9) if d["loss_mask"][i, k]]
        s = float(torch.exp(sum(lp[i, k] - d["old_logps"][i, k] for k in ks) / len(ks)))
        a = float(d["advantages"][i])
        slow -= min(s * a, min(max(s, 1 - 3e-4), 1 + 4e-4) * a) / 8
    check(loss, slow, model); print(info)
