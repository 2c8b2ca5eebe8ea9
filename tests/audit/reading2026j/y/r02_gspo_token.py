"""GSPO-token: the importance ratio is one number per SEQUENCE (geometric mean of token ratios) that is detached and then
multiplied by exp(logp - logp.detach()), so every token carries the same ratio value but its own gradient. The clip range
is tiny (3e-4 / 4e-4) because length-normalised ratios stay near 1. Zheng et al. 2025 (GSPO), eq. for GSPO-token; TRL importance_sampling_level."""
import torch
from torch import nn

FAMILY = "policy-gradient losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right padded with 0",
          "completion_mask": "1 where the token was sampled by the policy, [rows, time], aligned with ids",
          "old_logps": "log-probabilities of ids[:, 1:] under the policy that sampled, [rows, time-1], constant",
          "advantages": "one advantage per row, [rows], constant"}
SETTINGS = {"clip_low": "lower clip of the sequence ratio, 3e-4", "clip_high": "upper clip of the sequence ratio, 4e-4"}
NOTES = ("Policy-gradient, PPO-clip family with sequence-level ratio. Reduction: mean over the completion tokens of a row, "
         "then mean over rows. Clipping is all-or-nothing per row: a clipped row has no gradient at all. "
         "old_logps and advantages are constants. Every row has at least one completion token. All parameters are used. Any number of rows.")

class TinyLM(nn.Module):
    """Causal by construction; right padding after a row's end cannot change earlier logits."""
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def random_rows(g, rows, time, vocab):
    """Right-padded rows; mask is 1 on the completion (never on position 0, which nothing predicts)."""
    ids, mask = torch.zeros(rows, time, dtype=torch.long), torch.zeros(rows, time)
    for i in range(rows):
        prompt = int(torch.randint(2, 4, (1,), generator=g))
        end = int(torch.randint(prompt + 2, time + 1, (1,), generator=g))
        ids[i, :end] = torch.randint(1, vocab, (end,), generator=g)
        mask[i, prompt:end] = 1.0
    return ids, mask

def token_logps(logits, ids):
    """log p(ids[:, t] | ids[:, :t]) for t = 1 ... time-1."""
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)

def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    ids, mask = random_rows(g, 8, 10, 32)
    model = TinyLM()
    with torch.no_grad():
        old = token_logps(model(ids), ids) + 2e-3 * torch.randn(8, 9, generator=g)
    return {"model": model, "ids": ids, "completion_mask": mask, "old_logps": old, "advantages": torch.randn(8, generator=g)}


def right(model, batch, clip_low=3e-4, clip_high=4e-4):
    logp = token_logps(model(batch["ids"]), batch["ids"])
    mask = batch["completion_mask"][:, 1:]
    length = mask.sum(1)
    seq_log_ratio = ((logp - batch["old_logps"]) * mask).sum(1) / length
    ratio = torch.exp(seq_log_ratio.detach().unsqueeze(1) + logp - logp.detach())     # [rows, time-1]
    adv = batch["advantages"].unsqueeze(1)
    surrogate = torch.min(ratio * adv, ratio.clamp(1 - clip_low, 1 + clip_high) * adv)
    loss = -((surrogate * mask).sum(1) / length).mean()
    clipped = ((seq_log_ratio.exp() > 1 + clip_high) & (batch["advantages"] > 0)) | ((seq_log_ratio.exp() < 1 - clip_low) & (batch["advantages"] < 0))
    return loss, {"clipped_rows": clipped.float().mean().item()}


def grads(loss, model):
    return [g if g is not None else torch.zeros_like(p)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True))]


def close(a, b, tol=1e-5):
    return all(torch.allclose(x, y, rtol=1e-4, atol=tol) for x, y in zip(a, b))

if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss, metrics = right(model, d)
    # GSPO proper: differentiate the sequence ratio itself, row by row
    total = 0.0
    for i in range(8):
        diffs = []
        for t in range(1, 10):
            if d["completion_mask"][i, t] == 1:
                lp = model(d["ids"][i:i + 1, :t])[0, -1].log_softmax(-1)[d["ids"][i, t]]
                diffs.append(lp - d["old_logps"][i, t - 1])
        s, a = torch.exp(sum(diffs) / len(diffs)), d["advantages"][i]
        total = total - torch.min(s * a, s.clamp(1 - 3e-4, 1 + 4e-4) * a)
    total = total / 8
    g1, g2 = grads(loss, model), grads(total, model)
    print("loss", loss.item(), "explicit GSPO", total.item(), metrics)
    print("gradient norm", sum((g ** 2).sum() for g in g1).sqrt().item(), "equals sequence-level GSPO", close(g1, g2))
    assert abs(loss.item() - total.item()) < 1e-6 and close(g1, g2) and 0 < metrics["clipped_rows"] < 1
