"""Loss of one rank multiplied by the number of ranks and divided by the tokens of all ranks. transformers / TRL / verl (num_items_in_batch with average_tokens_across_devices, dp_size * loss / global tokens).
DDP and FSDP average gradients over ranks. For a mean over the tokens of all ranks each rank returns its own sum divided by the global number of tokens, times the number
of ranks. The value on one rank is neither its mean nor the global mean, and does not have to be near either."""
import torch
import torch.nn.functional as F

FAMILY = "sharding and reductions over ranks"
KIND = "loss"
INPUTS = {"ids": "token ids of this rank, [rows, time]", "labels": "next-token targets of this rank, already shifted (labels[t] is the target of the logits at t), -100 where not trained, [rows, time]",
          "num_items": "number of trained tokens of all ranks together (all_reduce of the counts), a scalar tensor"}
SETTINGS = {"dp_size": "number of ranks over whose gradients DDP averages, 4"}
NOTES = ("sum of the cross-entropy over this rank's trained tokens * dp_size / num_items; averaged over ranks this is the mean over the trained tokens of all ranks. num_items is a constant and does not "
         "follow from this rank's labels. All parameters are used. Any number of rows.")


class Tiny(torch.nn.Module):
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.mid = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, vocab)

    def forward(self, ids):
        h = self.emb(ids)
        return self.head(h + torch.tanh(self.mid(h)))


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 32, (3, 9))
    labels = torch.cat([ids[:, 1:], torch.full((3, 1), -100)], 1)
    labels[:, :2] = -100
    labels[2, 4:] = -100
    return {"model": Tiny(), "ids": ids, "labels": labels, "num_items": torch.tensor(float((labels != -100).sum() * 3 + 5))}


def right(model, batch, dp_size=4):
    logits = model(batch["ids"])
    total = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")
    return total * dp_size / batch["num_items"]


if __name__ == "__main__":
    torch.manual_seed(1)
    model = Tiny()
    ranks = []
    for r in range(4):                                     # four ranks with very different token counts
        ids = torch.randint(0, 32, (2, 9))
        labels = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1)
        labels[:, : 2 * r] = -100
        ranks.append({"ids": ids, "labels": labels})
    n = sum((b["labels"] != -100).sum() for b in ranks).float()
    avg = 0
    for b in ranks:
        g = torch.autograd.grad(right(model, b | {"num_items": n}), list(model.parameters()))
        avg = avg + torch.cat([x.flatten() for x in g]) / 4
    total = 0
    for b in ranks:
        lp = torch.log_softmax(model(b["ids"]), -1)
        for i, j in (b["labels"] != -100).nonzero().tolist():
            total = total - lp[i, j, b["labels"][i, j]]
    ref = torch.cat([x.flatten() for x in torch.autograd.grad(total / n, list(model.parameters()))])
    print("largest difference", (avg - ref).abs().max().item(), "gradient norm", ref.norm().item())
    assert torch.allclose(avg, ref, atol=1e-6)
