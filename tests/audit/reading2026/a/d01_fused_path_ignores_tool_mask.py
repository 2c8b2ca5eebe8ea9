"""Fused GRPO loss ignores the tool mask. huggingface/trl#4975, https://github.com/huggingface/trl/pull/4975, 2026.
The fused (Liger) path passed completion_mask alone as its loss mask, while the ordinary path multiplied it by
tool_mask (env_mask). In multi-turn runs the tool and user tokens inside the completion were trained as if the
policy had sampled them. Training went on without a message."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "token ids, prompt then several turns of model and tool tokens, right-padded, [rows, time]",
          "attention_mask": "1 for every real token, [rows, time]",
          "completion_mask": "1 for real tokens after the prompt, tool tokens included, [rows, time]",
          "tool_mask": "1 for tokens that the policy sampled, 0 for tokens inserted by a tool, [rows, time]",
          "old_logps": "log-probability of ids[:, 1:] under the sampling policy, a constant, [rows, time-1]",
          "advantages": "one advantage per row, a constant, [rows]"}
SETTINGS = {"clip": "PPO clip, 0.2"}
NOTES = ("Clipped policy gradient (GRPO). Only tokens sampled by the policy are trained; tool results are context. "
         "Mean over the trained tokens of a row, then mean over rows.")

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
    model, rows, time = TinyLM(), 4, 18
    ids = torch.randint(3, 32, (rows, time))
    attention_mask = torch.ones(rows, time, dtype=torch.long)
    completion_mask = torch.zeros(rows, time)
    tool_mask = torch.zeros(rows, time)
    for r in range(rows):
        end = time - r
        attention_mask[r, end:] = 0
        ids[r, end:] = 0
        completion_mask[r, 4:end] = 1
        tool_mask[r, 4:end] = 1
        tool_mask[r, 8:11 + r % 2] = 0                # a tool result between two model turns
    with torch.no_grad():
        old = token_logps(model(ids, attention_mask), ids) + 0.1 * torch.randn(rows, time - 1)
    return {"model": model, "ids": ids, "attention_mask": attention_mask, "completion_mask": completion_mask,
            "tool_mask": tool_mask, "old_logps": old, "advantages": torch.randn(rows)}

def _fused(logps, old_logps, advantages, loss_mask, clip):
    ratio = (logps - old_logps).exp()
    adv = advantages[:, None]
    per_token = -torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv)
    return ((per_token * loss_mask).sum(1) / loss_mask.sum(1).clamp(min=1)).mean()

def broken(model, batch, clip=0.2):
    logps = token_logps(model(batch["ids"], batch["attention_mask"]), batch["ids"])
    return _fused(logps, batch["old_logps"], batch["advantages"], batch["completion_mask"][:, 1:], clip)

def right(model, batch, clip=0.2):
    logps = token_logps(model(batch["ids"], batch["attention_mask"]), batch["ids"])
    loss_mask = batch["completion_mask"] * batch["tool_mask"]
    return _fused(logps, batch["old_logps"], batch["advantages"], loss_mask[:, 1:], clip)

def grads(fn):
    d = make(0)
    model = d.pop("model")
    out = fn(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

if __name__ == "__main__":
    (lb, gb), (lr, gr) = grads(broken), grads(right)
    print("loss", lb, lr, "gradient difference", (gb - gr).norm().item() / gr.norm().item())
    assert abs(lb - lr) > 1e-4 and (gb - gr).norm() > 1e-3
