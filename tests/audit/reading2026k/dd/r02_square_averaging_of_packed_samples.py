"""Square averaging: every token of a packed sample is weighted with 1/sqrt(its sample's number of trained tokens).
InternVL 2.5 (arXiv:2412.05271, section on loss reweighting; `loss_reduction="square"` in the public code). The middle way
between token averaging (long answers dominate) and sample averaging (short ones dominate). The loss is neither a mean over
tokens nor a mean over samples, and it is divided by the sum of the weights over all packed rows."""
import torch
import torch.nn as nn

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "token ids, several samples packed in each row, [rows, time]",
          "position_ids": "position in its sample, 0 at every start, [rows, time]",
          "loss_mask": "1 where the token is trained (never at the first token of a sample), [rows, time]"}
SETTINGS = {}
NOTES = ("Cross-entropy of next tokens. Weight of a trained token = 1/sqrt(number of trained tokens of its sample); loss = sum of "
         "weight * cross-entropy / sum of weights, both over all rows of the batch. So it is not a plain mean over trained "
         "tokens. The token at t is predicted by the logits at t-1. The weights are constants. All parameters are used. "
         "Attention stays inside a sample. No exact number of rows is needed.")


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
    position_ids = []
    for _ in range(3):
        cuts = sorted((torch.randperm(12, generator=g)[:2] + 2).tolist())
        lengths = [cuts[0], max(cuts[1] - cuts[0], 2), 0]
        lengths[2] = 16 - lengths[0] - lengths[1]
        position_ids.append(torch.cat([torch.arange(n) for n in lengths]))
    position_ids = torch.stack(position_ids)
    ids = torch.randint(1, 24, position_ids.shape, generator=g)
    loss_mask = ((torch.rand(ids.shape, generator=g) < 0.7) & (position_ids > 0)).float()
    loss_mask[position_ids == 1] = 1.0
    return {"model": TinyLM(), "ids": ids, "position_ids": position_ids, "loss_mask": loss_mask}


def right(model, batch):
    ids, mask = batch["ids"], batch["loss_mask"]
    sample = (batch["position_ids"] == 0).cumsum(-1)
    count = torch.zeros(len(ids), int(sample.max()) + 1).scatter_add(1, sample, mask)
    weight = mask * count.clamp(min=1).rsqrt().gather(1, sample)
    logp = model(ids, batch["position_ids"]).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    return -(weight[:, 1:] * logp).sum() / weight.sum()


if __name__ == "__main__":
    batch = make(0)
    model = batch.pop("model")
    loss = right(model, batch)
    loss.backward()
    top = bottom = 0.0
    for row in range(3):
        starts = batch["position_ids"][row].eq(0).nonzero().squeeze(-1).tolist() + [16]
        for a, b in zip(starts[:-1], starts[1:]):
            one = model(batch["ids"][row:row + 1, a:b]).log_softmax(-1)[0]
            trained = [t for t in range(1, b - a) if batch["loss_mask"][row, a + t]]
            top -= sum(one[t - 1, batch["ids"][row, a + t]].item() for t in trained) / len(trained) ** 0.5
            bottom += len(trained) ** 0.5
    print(loss.item(), top / bottom, "gradient", model.head.weight.grad.norm().item())
    assert abs(loss.item() - top / bottom) < 1e-5 and model.head.weight.grad.norm() > 0
