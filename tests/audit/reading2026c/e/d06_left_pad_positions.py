"""Log-prob forward under left padding without position ids. huggingface/trl#6800,
https://github.com/huggingface/trl/issues/6800, 2026. The online DPO / XPO / Nash-MD trainers left-pad prompts but pass
only ids and the attention mask to the scoring forward; a model with learned absolute positions then numbers the padded
row from the first pad, so each row is scored at positions shifted by its pad count. RoPE models do not notice. The fix
builds position ids from the mask as the PPO trainer does."""
FAMILY = "packing"
KIND = "loss"
import torch
import torch.nn as nn
import torch.nn.functional as F
INPUTS = {"ids": "left-padded prompt and completion of pairs, [2 * pairs, time]; first half chosen, second half rejected",
          "attention_mask": "1 on real tokens, [2 * pairs, time]",
          "completion_mask": "1 on completion tokens, [2 * pairs, time]",
          "ref_logps": "summed log-prob of each completion under the reference, [2 * pairs], constant"}
SETTINGS = {"beta": "DPO temperature, 0.1"}
NOTES = ("DPO: mean over pairs of -log sigmoid(beta * margin); log-probs are sums over completion tokens. The model has "
         "learned absolute positions which must count real tokens only. Needs an even number of rows.")


class TinyLM(nn.Module):
    """One causal attention layer; positions are learned."""

    def __init__(self, vocab=29, width=16, length=48):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, attention_mask=None, position_ids=None, allowed=None):
        rows, time = ids.shape
        if position_ids is None:
            position_ids = torch.arange(time).expand(rows, time)
        x = self.tok(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        score = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        see = torch.ones(time, time, dtype=torch.bool).tril().expand(rows, time, time)
        if allowed is not None:
            see = allowed
        if attention_mask is not None:
            see = see & attention_mask.bool()[:, None, :]
        score = score.masked_fill(~see, -1e9)
        return self.head(x + self.out(torch.tanh(score.softmax(-1) @ v)))


def make(seed):
    torch.manual_seed(seed)
    pairs, time = 4, 14
    ids = torch.randint(3, 29, (2 * pairs, time))
    attention_mask, completion_mask = torch.ones_like(ids), torch.zeros_like(ids)
    for i in range(2 * pairs):
        pad = [0, 3, 5, 2][i % pairs]
        attention_mask[i, :pad] = 0
        ids[i, :pad] = 0
        completion_mask[i, 8:] = 1
    for i in range(pairs):
        ids[pairs + i, :8] = ids[i, :8]
    ref = TinyLM()
    with torch.no_grad():
        ref_logps = _logps(ref, ids, attention_mask, completion_mask, attention_mask.cumsum(1) - attention_mask)
    return {"model": TinyLM(), "ids": ids, "attention_mask": attention_mask, "completion_mask": completion_mask,
            "ref_logps": ref_logps}


def _logps(model, ids, attention_mask, completion_mask, position_ids=None):
    logits = model(ids, attention_mask, position_ids)
    logp = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return (logp * completion_mask[:, 1:]).sum(1)


def _dpo(logps, ref, beta):
    half = logps.shape[0] // 2
    margin = (logps - ref)[:half] - (logps - ref)[half:]
    return -F.logsigmoid(beta * margin).mean()


def broken(model, batch, beta=0.1):
    logps = _logps(model, batch["ids"], batch["attention_mask"], batch["completion_mask"])
    return _dpo(logps, batch["ref_logps"], beta)


def right(model, batch, beta=0.1):
    mask = batch["attention_mask"]
    logps = _logps(model, batch["ids"], mask, batch["completion_mask"], mask.cumsum(1) - mask)
    return _dpo(logps, batch["ref_logps"], beta)


if __name__ == "__main__":
    values, grads = {}, {}
    for name, fn in (("broken", broken), ("right", right)):
        data = make(0)
        model = data.pop("model")
        loss = fn(model, data)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
        values[name] = loss.item()
        grads[name] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    print("loss", values)
    gap = (grads["broken"] - grads["right"]).norm() / grads["right"].norm()
    print("relative gradient gap", gap.item())
    assert gap > 1e-3
