"""The DAPO denominator counts completions that the numerator leaves out. huggingface/trl#6369 (fix #6439),
https://github.com/huggingface/trl/issues/6369, 2026. With mask_truncated_completions the tokens of completions cut at the
length limit are removed from the loss, but num_items_in_batch was counted before that. The more completions are
truncated, the smaller the loss and the gradient of the others."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, prompt then completion, right-padded, [rows, time]",
          "attention_mask": "1 for real tokens, [rows, time]", "completion_mask": "1 for completion tokens, [rows, time]",
          "truncated": "True where the completion hit the length limit, [rows]",
          "old_logps": "log-probability of ids[:, 1:] when sampled, a constant, [rows, time-1]",
          "advantages": "one advantage per row, a constant, [rows]"}
SETTINGS = {"clip_low": "lower clip, 0.2", "clip_high": "upper clip, 0.28"}
NOTES = ("Clipped policy gradient with the DAPO reduction: sum over trained tokens / number of trained tokens of the batch. "
         "Truncated completions are not trained at all (overlong filtering).")

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
    model, rows, time = TinyLM(), 6, 20
    ids = torch.randint(3, 32, (rows, time))
    lengths = torch.tensor([12, 20, 15, 20, 10, 17])
    t = torch.arange(time)[None]
    attention_mask = (t < lengths[:, None]).long()
    ids = ids * attention_mask
    completion_mask = ((t >= 4) & (t < lengths[:, None])).float()
    with torch.no_grad():
        old = token_logps(model(ids, attention_mask), ids) + 0.15 * torch.randn(rows, time - 1)
    return {"model": model, "ids": ids, "attention_mask": attention_mask, "completion_mask": completion_mask,
            "truncated": lengths == time, "old_logps": old, "advantages": torch.randn(rows)}

def _per_token(model, batch, clip_low, clip_high):
    logps = token_logps(model(batch["ids"], batch["attention_mask"]), batch["ids"])
    ratio, adv = (logps - batch["old_logps"]).exp(), batch["advantages"][:, None]
    return -torch.min(ratio * adv, ratio.clamp(1 - clip_low, 1 + clip_high) * adv)

def broken(model, batch, clip_low=0.2, clip_high=0.28):
    num_items_in_batch = batch["completion_mask"].sum()
    mask = batch["completion_mask"] * (~batch["truncated"])[:, None]
    return (_per_token(model, batch, clip_low, clip_high) * mask[:, 1:]).sum() / num_items_in_batch

def right(model, batch, clip_low=0.2, clip_high=0.28):
    mask = batch["completion_mask"] * (~batch["truncated"])[:, None]
    num_items_in_batch = mask.sum().clamp(min=1)
    return (_per_token(model, batch, clip_low, clip_high) * mask[:, 1:]).sum() / num_items_in_batch

def grads(fn):
    d = make(0)
    model = d.pop("model")
    out = fn(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

if __name__ == "__main__":
    (lb, gb), (lr, gr) = grads(broken), grads(right)
    print("loss", lb, lr, "ratio of gradient norms", (gb.norm() / gr.norm()).item())
    assert gb.norm() / gr.norm() < 0.8
