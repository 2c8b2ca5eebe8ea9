"""The critic's loss is a mean per micro-batch, and the micro-batches are summed. verl-project/verl#6957,
https://github.com/verl-project/verl/pull/6957, 2026 (asked in verl-project/verl#7110, 2026).
The engine expects each micro-batch to return its share of the mini-batch mean and only adds up the gradients. The actor
loss gets the global token count for that, the value loss did not and divided by the tokens of its own micro-batch. The
critic's gradient grew with the number of micro-batches and short micro-batches weighed as much as long ones."""
import torch
import torch.nn as nn

FAMILY = "losses"
KIND = "update"
INPUTS = {"batches": "the micro-batches of one mini-batch, each a dict: ids [rows, time], response_mask [rows, time], "
                     "old_values [rows, time], returns [rows, time]"}
SETTINGS = {"cliprange_value": "clip of the value change, 0.5"}
NOTES = ("One optimizer step of a critic (SGD). Clipped value loss, 0.5 * max of the two squared errors, mean over the "
         "response tokens of the whole mini-batch (all micro-batches). How the mini-batch is cut must not matter. "
         "old_values and returns are constants.")


class TinyCritic(nn.Module):
    def __init__(self, vocab=32, width=16, outputs=1):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, ids):
        return self.head(self.mix(self.tok(ids))[0])


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = TinyCritic()
    batches = []
    for rows in (2, 3, 2, 1):
        t = int(torch.randint(4, 10, (1,), generator=g))
        lens = torch.randint(1, t + 1, (rows,), generator=g)
        batches.append({"ids": torch.randint(0, 32, (rows, t), generator=g),
                        "response_mask": (torch.arange(t)[None] < lens[:, None]).float(),
                        "old_values": 0.3 * torch.randn(rows, t, generator=g),
                        "returns": torch.randn(rows, t, generator=g)})
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "batches": batches}


def _value_loss_sum(model, b, c):
    v = model(b["ids"])[..., 0]
    clipped = b["old_values"] + (v - b["old_values"]).clamp(-c, c)
    loss = 0.5 * torch.max((v - b["returns"]) ** 2, (clipped - b["returns"]) ** 2)
    return (loss * b["response_mask"]).sum()


def broken(model, optimizer, batches, cliprange_value=0.5):
    optimizer.zero_grad()
    for b in batches:
        batch_num_tokens = b["response_mask"].sum()
        loss = _value_loss_sum(model, b, cliprange_value) / batch_num_tokens
        loss.backward()
    optimizer.step()


def right(model, optimizer, batches, cliprange_value=0.5):
    optimizer.zero_grad()
    batch_num_tokens = sum(b["response_mask"].sum() for b in batches)
    for b in batches:
        loss = _value_loss_sum(model, b, cliprange_value) / batch_num_tokens
        loss.backward()
    optimizer.step()


if __name__ == "__main__":
    moves = []
    for f in (broken, right):
        c = make(0)
        before = [p.detach().clone() for p in c["model"].parameters()]
        f(**c)
        moves.append(torch.cat([(p.detach() - q).flatten() for p, q in zip(c["model"].parameters(), before)]))
        print(f.__name__, "size of the step", moves[-1].norm().item())
    print("difference", (moves[0] - moves[1]).norm().item())
    assert (moves[0] - moves[1]).norm() > 1e-2
