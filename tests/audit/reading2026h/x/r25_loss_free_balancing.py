"""Balancing experts without a loss: a bias that has no gradient and is moved by a fixed step (Wang et al., arXiv 2408.15664; DeepSeek-V3, torchtitan).
The bias is added to the scores only to choose the experts; the weights of the chosen experts come from the scores without bias. After the optimizer step the bias goes up by `rate` for experts with fewer tokens
than the mean and down for the others, by the sign only. It is a buffer, not in the optimizer, not decayed, and centred. Counts are those of all micro-batches of the step."""
FAMILY = "losses"
KIND = "update"
INPUTS = {"model": "a small mixture of experts with a buffer `bias`", "optimizer": "AdamW over the parameters", "batches": "list of micro-batches of equal size, each a dict of ids [rows, time]"}
SETTINGS = {"rate": "step of the bias, 0.01", "top_k": "experts per token, 2"}
NOTES = ("One optimizer step over all micro-batches (each divided by their number; equal sizes), mean next-token cross entropy, no auxiliary loss. The bias changes although it has no gradient, and not by the optimizer. "
         "The bias influences the choice only.")
import torch
import torch.nn.functional as F
from torch import nn


class MoE(nn.Module):
    def __init__(self, vocab=40, width=16, experts=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.Parameter(torch.randn(experts, width, width) * 0.3)
        self.head = nn.Linear(width, vocab)
        self.register_buffer("bias", torch.zeros(experts))
        nn.init.normal_(self.gate.weight, std=0.7)

    def forward(self, ids, top_k):
        x = self.embed(ids).flatten(0, 1)
        scores = torch.sigmoid(self.gate(x))
        chosen = (scores.detach() + self.bias).topk(top_k, -1).indices
        weight = scores.gather(-1, chosen)
        weight = weight / weight.sum(-1, keepdim=True)
        every = torch.einsum("nd,edf->nef", x, self.experts)
        y = (every.gather(1, chosen.unsqueeze(-1).expand(-1, -1, x.shape[-1])) * weight.unsqueeze(-1)).sum(1)
        count = torch.bincount(chosen.flatten(), minlength=self.bias.numel()).float()
        return self.head(x + torch.tanh(y)).view(*ids.shape, -1), count


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = MoE()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3), "batches": [{"ids": torch.randint(0, 40, (3, 9), generator=g)} for _ in range(2)]}


def right(model, optimizer, batches, rate=0.01, top_k=2):
    optimizer.zero_grad()
    counts = torch.zeros_like(model.bias)
    for b in batches:
        logits, count = model(b["ids"], top_k)
        counts += count
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), b["ids"][:, 1:].flatten())
        (loss / len(batches)).backward()
    optimizer.step()
    with torch.no_grad():
        delta = rate * torch.sign(counts.mean() - counts)
        model.bias += delta - delta.mean()
    optimizer.zero_grad()


if __name__ == "__main__":
    d = make(0)
    with torch.no_grad():
        before = sum(d["model"](b["ids"], 2)[1] for b in d["batches"])
    w = d["model"].gate.weight.detach().clone()
    right(**d)
    print("tokens", before.tolist(), "bias", d["model"].bias.tolist(), "gate moved", (d["model"].gate.weight - w).abs().max().item())
    assert before.sum() == 2 * 54 and abs(d["model"].bias.sum()) < 1e-6 and (d["model"].gate.weight - w).abs().max() > 0
    sign = torch.sign(before.mean() - before)
    assert torch.allclose(d["model"].bias, 0.01 * (sign - sign.mean()), atol=1e-7)
    for _ in range(150):
        for g in d["optimizer"].param_groups:
            g["lr"] = 0.0
        right(**d)
    with torch.no_grad():
        after = sum(d["model"](b["ids"], 2)[1] for b in d["batches"])
    print("after 150 steps of the bias alone:", after.tolist())
    assert after.std() < before.std()
