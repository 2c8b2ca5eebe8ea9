"""Policy gradient on the sampled tokens plus, on purpose, cross entropy on the tool's tokens (world-model signal).
Observation tokens get a supervised next-token loss with a small weight, independent of the advantage; the two parts
have their own denominators. Tool scaffolding (role tags) is in neither mask. Compare huggingface/trl#5832 (2026)."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "token ids, several turns, [rows, time]", "action_mask": "1 for tokens sampled by the policy, [rows, time]",
          "observation_mask": "1 for the text that a tool returned, disjoint from action_mask, [rows, time]",
          "advantages": "one advantage per row, a constant, [rows]"}
SETTINGS = {"observation_weight": "weight of the observation loss, 0.1"}
NOTES = ("REINFORCE over action tokens (mean over the action tokens of the batch) + observation_weight * cross entropy over the "
         "observation tokens (mean over the observation tokens of the batch). Training on tool output is intended.")

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
    ids = torch.randint(3, 32, (3, 20))
    action, observation = torch.zeros(3, 20), torch.zeros(3, 20)
    action[:, 3:8] = action[:, 14:19] = 1
    observation[:, 9:13] = 1                               # 8 and 13 are role tags
    return {"model": TinyLM(), "ids": ids, "action_mask": action, "observation_mask": observation, "advantages": torch.randn(3)}

def right(model, batch, observation_weight=0.1):
    logps = token_logps(model(batch["ids"]), batch["ids"])
    act, obs = batch["action_mask"][:, 1:], batch["observation_mask"][:, 1:]
    policy = -(batch["advantages"][:, None] * logps * act).sum() / act.sum()
    world = -(logps * obs).sum() / obs.sum().clamp(min=1)
    return policy + observation_weight * world, {"policy": policy.detach(), "world": world.detach()}

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
    logp = d["model"](d["ids"]).log_softmax(-1)
    pol = wor = 0.0
    for r in range(3):
        for t in range(1, 20):
            x = logp[r, t - 1, d["ids"][r, t]].item()
            pol -= d["advantages"][r].item() * x * d["action_mask"][r, t].item() / 30
            wor -= x * d["observation_mask"][r, t].item() / 12
    print("loss", loss, "explicit", pol + 0.1 * wor, "gradient norm", grad.norm().item())
    assert abs(loss - pol - 0.1 * wor) < 1e-4 and grad.norm() > 0
