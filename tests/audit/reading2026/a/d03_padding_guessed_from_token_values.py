"""Attention mask guessed from token values when pad == eos. huggingface/trl#4974,
https://github.com/huggingface/trl/issues/4974, 2026 (describes the bug of the former multi-turn support, #4848).
The padding of multi-turn completions was inferred as ids != pad_token_id. Where the tokenizer pads with EOS, the EOS
that closes each earlier turn is hidden from attention, so the trained log-probabilities are not those of generation."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "token ids, several turns each closed by EOS (id 2), right-padded with the same id 2, [rows, time]",
          "lengths": "number of real tokens of each row, [rows]",
          "loss_mask": "1 for tokens that the policy sampled (its EOS included), [rows, time]",
          "advantages": "one advantage per row, a constant, [rows]"}
SETTINGS = {"pad_id": "padding id, 2, equal to EOS"}
NOTES = ("REINFORCE with a given advantage: mean over all trained tokens of the batch of -advantage * logp. Attention "
         "must see every real token, the EOS of earlier turns included, and no padding.")

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
    model, rows, time = TinyLM(), 4, 20
    ids = torch.randint(3, 32, (rows, time))
    lengths = torch.tensor([20, 18, 17, 15])
    loss_mask = torch.zeros(rows, time)
    for r in range(rows):
        n = int(lengths[r])
        ids[r, 8] = 2                                  # end of the first model turn
        ids[r, n - 1] = 2                              # end of the last one
        ids[r, n:] = 2
        loss_mask[r, 4:9] = 1
        loss_mask[r, 12:n] = 1
    return {"model": model, "ids": ids, "lengths": lengths, "loss_mask": loss_mask, "advantages": torch.randn(rows)}

def _reinforce(model, batch, attention_mask):
    logps = token_logps(model(batch["ids"], attention_mask), batch["ids"])
    mask = batch["loss_mask"][:, 1:]
    return -(batch["advantages"][:, None] * logps * mask).sum() / mask.sum()

def broken(model, batch, pad_id=2):
    return _reinforce(model, batch, (batch["ids"] != pad_id).long())

def right(model, batch, pad_id=2):
    time = batch["ids"].shape[1]
    return _reinforce(model, batch, (torch.arange(time)[None] < batch["lengths"][:, None]).long())

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
    assert (gb - gr).norm() / gr.norm() > 1e-3
