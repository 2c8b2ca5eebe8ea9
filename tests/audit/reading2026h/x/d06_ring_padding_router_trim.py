"""Ring padding inside the pack enters the MoE balancing loss. modelscope/ms-swift#10181, https://github.com/modelscope/ms-swift/pull/10181, 2026.
Ring sequence parallelism pads each sequence of a pack on its own. After the gather the router logits were cut to the original total
length, which keeps the padding between the sequences and drops real tokens of the last ones: wrong balancing loss and gradients.
The fix selects with the mask of the padded layout."""
FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "packed token ids, [1, time]", "lengths": "lengths of the packed sequences, [sequences], sum is time",
          "labels": "next-token labels, -100 at the end of each sequence, [1, time]"}
SETTINGS = {"ring": "ring size; each sequence is padded to a multiple of 2 * ring, 2", "aux_coef": "weight of the balancing loss, 0.1", "pad_id": "padding id, 0"}
NOTES = ("Mean cross entropy over the labelled tokens plus aux_coef times the top-1 Switch balancing loss over the real tokens of the pack (padding excluded). "
         "The model works per token, so the ranks are not simulated; the gathered layout is. Every parameter is used.")
import torch
import torch.nn.functional as F
from torch import nn


class Routed(nn.Module):
    def __init__(self, vocab=40, width=16, experts=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.Parameter(torch.randn(experts, width, width) * 0.3)
        self.head = nn.Linear(width, vocab)
        nn.init.normal_(self.gate.weight, std=0.7)

    def forward(self, ids):
        x = self.embed(ids)
        router = self.gate(x)
        mixed = torch.einsum("bte,btd,edf->btf", router.softmax(-1), x, self.experts)
        return self.head(x + torch.tanh(mixed)), router


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    lengths = torch.tensor([5, 7, 6])
    ids = torch.randint(1, 40, (1, 18), generator=g)
    labels = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)
    labels[0, lengths.cumsum(0) - 1] = -100
    return {"model": Routed(), "ids": ids, "lengths": lengths, "labels": labels}


def pad_each(x, lengths, multiple, value):
    parts = [F.pad(p, (0, -len(p) % multiple), value=value) for p in x[0].split(lengths.tolist())]
    return torch.cat(parts).unsqueeze(0)


def balancing(router):
    probs = router.softmax(-1)
    f = F.one_hot(probs.argmax(-1), probs.shape[-1]).float().mean(0)
    return probs.shape[-1] * (f * probs.mean(0)).sum()


def broken(model, batch, ring=2, aux_coef=0.1, pad_id=0):
    lengths = batch["lengths"]
    ids = pad_each(batch["ids"], lengths, 2 * ring, pad_id)
    labels = pad_each(batch["labels"], lengths, 2 * ring, -100)
    logits, router = model(ids)
    ce = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    router = router[0, : batch["ids"].shape[1]]
    return ce + aux_coef * balancing(router)


def right(model, batch, ring=2, aux_coef=0.1, pad_id=0):
    lengths = batch["lengths"]
    ids = pad_each(batch["ids"], lengths, 2 * ring, pad_id)
    labels = pad_each(batch["labels"], lengths, 2 * ring, -100)
    real = pad_each(torch.ones_like(batch["ids"]), lengths, 2 * ring, 0).bool()
    logits, router = model(ids)
    ce = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    router = router[real]
    return ce + aux_coef * balancing(router)


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    b, r = broken(m, d), right(m, d)
    logits, router = m(d["ids"])
    plain = F.cross_entropy(logits.flatten(0, 1), d["labels"].flatten(), ignore_index=-100) + 0.1 * balancing(router[0])
    print("broken", b.item(), "right", r.item(), "without padding", plain.item())
    assert abs(r - plain) < 1e-6 and abs(b - r) > 1e-4
