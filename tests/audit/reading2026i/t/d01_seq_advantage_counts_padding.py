"""Sequence-level PPO/GSPO averages token advantages over masked positions. areal-project/AReaL#1346, https://github.com/areal-project/AReaL/pull/1346, 2026.
With importance_sampling_level="sequence" and 2D padded input, the token advantages of a row were averaged over the
whole row, prompt and padding included, instead of over loss_mask. Values at positions that are not trained, and the
amount of padding, changed the advantage of the trained tokens, so the gradient, with no error."""
import torch
import torch.nn as nn
import torch.nn.functional as F
FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token at t is trained (predicted from t-1), [rows, time]",
          "old_logprobs": "log-probability of each token under the behaviour policy, [rows, time]",
          "advantages": "token advantages, [rows, time]; entries outside loss_mask have no meaning"}
SETTINGS = {"eps_clip": "PPO clip, 0.2"}
NOTES = ("GSPO: one ratio per sequence (geometric mean over trained tokens), one advantage per sequence (mean of the token "
         "advantages of trained tokens). Reduction: mean over the trained tokens of all rows. old_logprobs and advantages are constants. All parameters are used.")

class Tiny(nn.Module):
    def __init__(self, vocab=31, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Tiny()
    B, T = 4, 12
    ids = torch.randint(1, 31, (B, T), generator=g)
    mask = torch.zeros(B, T)
    for b in range(B):
        p = int(torch.randint(2, 4, (1,), generator=g)); n = int(torch.randint(4, 8, (1,), generator=g))
        mask[b, p:p + n] = 1
    with torch.no_grad():
        lp = logprobs(model, ids)
    adv = torch.randn(B, 1, generator=g) + 0.3 * torch.randn(B, T, generator=g)
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logprobs": lp + 0.05 * torch.randn(B, T, generator=g), "advantages": adv}

def logprobs(model, ids):
    lp = torch.log_softmax(model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    return F.pad(lp, (1, 0))

def _ppo(ratio, adv, mask, eps_clip):
    loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - eps_clip, 1 + eps_clip))
    return torch.where(mask.bool(), loss, torch.zeros_like(loss)).sum() / mask.sum().clamp(min=1)

def _seq_ratio(model, batch):
    mask = batch["loss_mask"]
    log_ratio = (logprobs(model, batch["ids"]) - batch["old_logprobs"]) * mask
    return torch.exp(log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).expand_as(mask)

def broken(model, batch, eps_clip=0.2):
    mask = batch["loss_mask"]
    adv = batch["advantages"].mean(-1, keepdim=True).expand_as(mask)
    return _ppo(_seq_ratio(model, batch), adv, mask, eps_clip)

def right(model, batch, eps_clip=0.2):
    mask = batch["loss_mask"]
    adv = (batch["advantages"] * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    adv = adv.expand_as(mask) * mask
    return _ppo(_seq_ratio(model, batch), adv, mask, eps_clip)

if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    out = []
    for f in (broken, right):
        m.zero_grad(); l = f(m, b); l.backward()
        out.append((l.item(), torch.cat([p.grad.flatten() for p in m.parameters()]).norm().item()))
    print("broken", out[0], "right", out[1])
    assert abs(out[0][0] - out[1][0]) > 1e-3
