"""Distillation loss normalised per micro-batch under gradient accumulation. huggingface/trl#6006,
https://github.com/huggingface/trl/pull/6006, 2026. The GKD, GOLD and distillation trainers accept num_items_in_batch, so
the base trainer leaves out its own division by the accumulation steps; but they never used the number and divided the
JSD by the valid tokens of the own micro-batch. The accumulated gradient was a sum of micro-batch means: its size and the
weight of a token depended on how the batch was split. The fix divides the sum by num_items_in_batch."""
FAMILY = "losses"
KIND = "update"
import torch
import torch.nn as nn
import torch.nn.functional as F
INPUTS = {"model": "student language model", "optimizer": "its optimizer",
          "batches": "list of micro-batches of one optimizer step: dicts with ids, [rows, time], labels (-100 = not distilled), "
                     "[rows, time], teacher_logits, [rows, time, vocabulary], constant"}
SETTINGS = {"beta": "weight of the teacher in the mixture of the generalized JSD, 0.5"}
NOTES = ("One optimizer step over all micro-batches with the gradient of the mean JSD over all valid tokens of the step "
         "(num_items_in_batch), however they are split. Logits at a place are compared with the teacher at the same place and "
         "count where the next label is valid.")


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
    model, teacher = TinyLM(), TinyLM()
    batches = []
    for prompt, time in ((3, 12), (7, 9), (5, 15)):
        ids = torch.randint(0, 29, (2, time))
        labels = ids.clone()
        labels[:, :prompt] = -100
        with torch.no_grad():
            batches.append({"ids": ids, "labels": labels, "teacher_logits": 3 * teacher(ids)})
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "batches": batches}


def generalized_jsd(student_logits, teacher_logits, labels, beta, num_items_in_batch=None):
    s, t = student_logits[:, :-1].log_softmax(-1), teacher_logits[:, :-1].log_softmax(-1)
    mix = torch.logsumexp(torch.stack([s + torch.tensor(1 - beta).log(), t + torch.tensor(beta).log()]), 0)
    kl = lambda p: (p.exp() * (p - mix)).sum(-1)
    jsd = (beta * kl(t) + (1 - beta) * kl(s))[labels[:, 1:] != -100]
    return jsd.sum() / (jsd.numel() if num_items_in_batch is None else num_items_in_batch)


def _step(model, optimizer, batches, beta, honor):
    num_items_in_batch = sum((b["labels"][:, 1:] != -100).sum() for b in batches)
    optimizer.zero_grad()
    for b in batches:
        loss = generalized_jsd(model(b["ids"]), b["teacher_logits"], b["labels"], beta, num_items_in_batch if honor else None)
        loss.backward()                       # the base trainer does not divide by len(batches): the loss accepts the count
    optimizer.step()


def broken(model, optimizer, batches, beta=0.5):
    _step(model, optimizer, batches, beta, honor=False)


def right(model, optimizer, batches, beta=0.5):
    _step(model, optimizer, batches, beta, honor=True)


if __name__ == "__main__":
    moves = {}
    for fn in (broken, right):
        data = make(0)
        before = torch.cat([p.detach().flatten() for p in data["model"].parameters()])
        fn(**data)
        moves[fn.__name__] = torch.cat([p.detach().flatten() for p in data["model"].parameters()]) - before
    b, r = moves["broken"], moves["right"]
    print("update norm", b.norm().item(), r.norm().item(), "cosine", F.cosine_similarity(b, r, 0).item())
    assert (b - r).norm() > 1e-3 * r.norm()
