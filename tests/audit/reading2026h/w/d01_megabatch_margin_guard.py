"""MegaBatchMarginLoss: every mini-batch but the last gives no gradient. huggingface/sentence-transformers#3854, https://github.com/huggingface/sentence-transformers/pull/3854, 2026.
The mini-batched form of the loss calls backward inside its loop for all mini-batches but the last one, whose loss is left for the outer backward.
The guard compared the end index with len(cos_scores), which is the number of rows of the present mini-batch and not of the whole batch, so it was never true.
Only the last mini-batch reached the optimizer; the loss printed looked normal."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "losses"
KIND = "update"
INPUTS = {"model": "encoder, ids [rows, time] -> embedding [rows, width]", "optimizer": "SGD over the model",
          "batches": "list of dicts: anchor ids and positive ids, both [rows, time]; row i of both belong together"}
SETTINGS = {"mini": "rows of one mini-batch, 4", "pos_margin": "0.8", "neg_margin": "0.3"}
NOTES = ("Contrastive margin loss, mean over all rows of a batch; the hardest negative of each anchor is picked from all positives without gradient. "
         "One optimizer step per batch. The number of rows need not divide by mini; the result must not depend on mini.")


class Encoder(nn.Module):
    def __init__(self, vocab=40, width=16):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, width, mode="mean")
        self.lin = nn.Linear(width, width)

    def forward(self, ids):
        return F.normalize(self.lin(self.emb(ids)), dim=-1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Encoder()
    batches = [{"anchor": torch.randint(0, 40, (10, 6), generator=g), "positive": torch.randint(0, 40, (10, 6), generator=g)} for _ in range(2)]
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": batches}


def _mini_loss(model, batch, all_pos, start, end, pos_margin, neg_margin):
    anchor = model(batch["anchor"][start:end])
    cos_scores = anchor.detach() @ all_pos.T
    own = torch.arange(start, end)
    hard = cos_scores.scatter(1, own[:, None], -2.0).argmax(1)
    pos = model(batch["positive"][start:end])
    neg = model(batch["positive"][hard])
    loss = F.relu(pos_margin - (anchor * pos).sum(-1)) + F.relu((anchor * neg).sum(-1) - neg_margin)
    return loss.mean() * (end - start) / len(batch["anchor"]), cos_scores


def broken(model, optimizer, batches, mini=4, pos_margin=0.8, neg_margin=0.3):
    for batch in batches:
        optimizer.zero_grad()
        n = len(batch["anchor"])
        with torch.no_grad():
            all_pos = torch.cat([model(batch["positive"][i:i + mini]) for i in range(0, n, mini)])
        for start in range(0, n, mini):
            end = min(start + mini, n)
            loss, cos_scores = _mini_loss(model, batch, all_pos, start, end, pos_margin, neg_margin)
            if end < len(cos_scores):
                loss.backward()
        loss.backward()
        optimizer.step()


def right(model, optimizer, batches, mini=4, pos_margin=0.8, neg_margin=0.3):
    for batch in batches:
        optimizer.zero_grad()
        n = len(batch["anchor"])
        with torch.no_grad():
            all_pos = torch.cat([model(batch["positive"][i:i + mini]) for i in range(0, n, mini)])
        for start in range(0, n, mini):
            end = min(start + mini, n)
            loss, cos_scores = _mini_loss(model, batch, all_pos, start, end, pos_margin, neg_margin)
            if end < n:
                loss.backward()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    a, b, c = make(0), make(0), make(0)
    broken(**a); right(**b); right(**c, mini=10)
    flat = lambda d: torch.cat([p.detach().flatten() for p in d["model"].parameters()])
    print("broken vs right", (flat(a) - flat(b)).norm().item(), " right vs one whole batch", (flat(b) - flat(c)).norm().item())
    assert (flat(a) - flat(b)).norm() > 1e-2 and torch.allclose(flat(b), flat(c), atol=1e-5)
