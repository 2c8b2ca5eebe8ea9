"""IPO on packed rows divides by the number of trained tokens of the whole row.
modelscope/ms-swift#9925, https://github.com/modelscope/ms-swift/pull/9925, 2026.
IPO works with the mean log-probability of a completion. The trainer divided the per-token log-probabilities by
`loss_mask.sum(-1)` before reducing them to sequences; in padding-free batches that sum is the count of the whole packed
row, so every score is too small by the number of sequences (and by their lengths)."""
import torch
import torch.nn as nn

FAMILY = "preferences"
KIND = "loss"
INPUTS = {"ids": "token ids of all sequences packed in one row, first the chosen ones, then the rejected ones in the same order of pairs, [1, time]",
          "position_ids": "position in its sequence, 0 at every start, [1, time]",
          "loss_mask": "1 where the token is trained, that is on completion tokens, [1, time]",
          "ref_logps": "log-probability of each token under the frozen reference model, 0 at the first token of a sequence, [1, time]"}
SETTINGS = {"beta": "IPO beta, 0.1"}
NOTES = ("IPO: per pair (h - 1/(2 beta))^2, h = (mean log-ratio policy/reference of the chosen completion) - (the same of the "
         "rejected one), each a mean over the trained tokens of that completion. Mean over pairs. The reference log-probs are "
         "constants. The token at position t is predicted by the logits at t-1; the first token of a sequence is never "
         "trained. All of the model's parameters are used. The number of sequences is even.")


class TinyLM(nn.Module):
    """One causal attention layer with learned positions; logits [rows, time, vocabulary]."""

    def __init__(self, vocabulary=24, width=16, positions=64):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(positions, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocabulary)

    def hidden(self, ids, position_ids=None):
        rows, time = ids.shape
        if position_ids is None:
            position_ids = torch.arange(time).expand(rows, time)
        x = self.embed(ids) + self.position(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        document = (position_ids == 0).cumsum(-1)
        allowed = torch.ones(time, time, dtype=torch.bool).tril() & (document[:, :, None] == document[:, None, :])
        scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~allowed, float("-inf"))
        return x + scores.softmax(-1) @ v

    def forward(self, ids, position_ids=None):
        return self.head(self.hidden(ids, position_ids))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model, reference = TinyLM(), TinyLM()
    lengths = torch.randint(5, 10, (6,), generator=g).tolist()
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = torch.randint(1, 24, position_ids.shape, generator=g)
    loss_mask = (position_ids >= 2).float()
    with torch.no_grad():
        ref = _token_logps(reference, ids, position_ids)
    return {"model": model, "ids": ids, "position_ids": position_ids, "loss_mask": loss_mask, "ref_logps": ref}


def _token_logps(model, ids, position_ids):
    logps = model(ids, position_ids).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    logps = torch.cat([torch.zeros_like(logps[:, :1]), logps], 1)
    return logps.masked_fill(position_ids == 0, 0.0)


def _per_sequence(values, position_ids):
    sequence = (position_ids[0] == 0).cumsum(0) - 1
    return values.new_zeros(int(sequence[-1]) + 1).index_add(0, sequence, values[0])


def broken(model, batch, beta=0.1):
    mask, position_ids = batch["loss_mask"], batch["position_ids"]
    policy = _token_logps(model, batch["ids"], position_ids) * mask / mask.sum(-1, keepdim=True)
    ref = batch["ref_logps"] * mask / mask.sum(-1, keepdim=True)
    policy, ref = _per_sequence(policy, position_ids), _per_sequence(ref, position_ids)
    chosen, rejected = (policy - ref).chunk(2)
    return (((chosen - rejected) - 1 / (2 * beta)) ** 2).mean()


def right(model, batch, beta=0.1):
    mask, position_ids = batch["loss_mask"], batch["position_ids"]
    count = _per_sequence(mask, position_ids).clamp(min=1)
    policy = _per_sequence(_token_logps(model, batch["ids"], position_ids) * mask, position_ids) / count
    ref = _per_sequence(batch["ref_logps"] * mask, position_ids) / count
    chosen, rejected = (policy - ref).chunk(2)
    return (((chosen - rejected) - 1 / (2 * beta)) ** 2).mean()


if __name__ == "__main__":
    batch = make(0)
    model = batch.pop("model")
    grads = []
    for fn in (broken, right):
        model.zero_grad()
        loss = fn(model, batch)
        loss.backward()
        grads.append(model.head.weight.grad.norm().item())
        print(fn.__name__, loss.item(), "gradient norm of the head", grads[-1])
    assert grads[1] > 2 * grads[0]
