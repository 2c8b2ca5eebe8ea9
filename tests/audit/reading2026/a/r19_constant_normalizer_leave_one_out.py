"""Policy gradient divided by a constant: rows times the length limit, not the number of tokens; leave-one-out baseline, no std.
Long and short completions weigh the same per token (no length bias). The baseline of a row is the mean of the other rows of its
group; it is not divided by a deviation, so groups with equal rewards simply give 0. The loss is small because most of the
length limit is unused."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, right-padded, [rows, time]", "attention_mask": "1 for real tokens, [rows, time]",
          "completion_mask": "1 for sampled tokens, [rows, time]", "rewards": "reward of each row, [rows]", "groups": "prompt index, [rows]"}
SETTINGS = {"max_completion": "length limit of generation, 64"}
NOTES = "REINFORCE, on-policy. Sum over sampled tokens of -advantage*logp / (rows * max_completion). Advantage = reward - mean reward of the other rows of the group."

class TinyLM(nn.Module):
    """One causal attention layer; returns logits [rows, time, vocabulary]."""
    def __init__(self, vocab=32, dim=16, max_pos=128):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, dim), nn.Embedding(max_pos, dim)
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids, attention_mask=None, position_ids=None, document_ids=None):
        rows, time = ids.shape
        if position_ids is None:
            position_ids = torch.arange(time).expand(rows, time)
        x = self.emb(ids) + self.pos(position_ids)
        allowed = torch.ones(time, time, dtype=torch.bool).tril()[None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, :]
        if document_ids is not None:
            allowed = allowed & (document_ids[:, :, None] == document_ids[:, None, :])
        allowed = allowed | torch.eye(time, dtype=torch.bool)[None]
        scores = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        x = x + scores.masked_fill(~allowed, -1e9).softmax(-1) @ self.v(x)
        return self.head(x)

def token_logps(logits, ids):
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)

def make(seed):
    torch.manual_seed(seed)
    lengths = torch.tensor([9, 14, 20, 11, 8, 17])
    t = torch.arange(20)[None]
    attention_mask = (t < lengths[:, None]).long()
    return {"model": TinyLM(), "ids": torch.randint(1, 32, (6, 20)) * attention_mask, "attention_mask": attention_mask,
            "completion_mask": ((t >= 4) & (t < lengths[:, None])).float(), "rewards": torch.tensor([1.0, 0, 0, 1, 1, 1]), "groups": torch.tensor([0, 0, 0, 1, 1, 1])}

def right(model, batch, max_completion=64):
    rewards, groups = batch["rewards"], batch["groups"]
    same = (groups[:, None] == groups[None]).float() - torch.eye(len(groups))
    advantages = rewards - same @ rewards / same.sum(1)
    logps = token_logps(model(batch["ids"], batch["attention_mask"]), batch["ids"])
    return -(advantages[:, None] * logps * batch["completion_mask"][:, 1:]).sum() / (len(rewards) * max_completion)

def grads(fn):
    d = make(0)
    model = d.pop("model")
    out = fn(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

if __name__ == "__main__":
    loss, grad = grads(right)
    d = make(0)
    logp, total = d["model"](d["ids"], d["attention_mask"]).log_softmax(-1), 0.0
    for r in range(6):
        others = [d["rewards"][j].item() for j in range(6) if j != r and d["groups"][j] == d["groups"][r]]
        adv = d["rewards"][r].item() - sum(others) / len(others)
        for t in range(1, 20):
            if d["completion_mask"][r, t]:
                total -= adv * logp[r, t - 1, d["ids"][r, t]].item()
    print("loss", loss, "explicit", total / (6 * 64), "gradient norm", grad.norm().item())
    assert abs(loss - total / 384) < 1e-5 and grad.norm() > 0
