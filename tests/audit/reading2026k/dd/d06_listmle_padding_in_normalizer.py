"""ListMLE counts padding in the Plackett-Luce normalizer.
huggingface/sentence-transformers#3827, https://github.com/huggingface/sentence-transformers/pull/3827, 2026.
The scores of each query's documents are scattered in a (queries, longest list) matrix whose padding is the logit 1e-16.
exp(1e-16) is 1, so every padded slot enters the reverse cumulative sum of all real documents of its query; the mask is
applied only to the result. Loss and gradient of a query depend on how many documents the longest other query has."""
import torch
import torch.nn as nn

FAMILY = "reward models"
KIND = "loss"
INPUTS = {"ids": "token ids of the query-document texts, the documents of one query stand together, [documents, time]",
          "labels": "graded relevance of each document, different within a query, [documents]",
          "docs_per_query": "number of documents of each query, in order, [queries]"}
SETTINGS = {}
NOTES = ("ListMLE: for each query the negative log-likelihood, under Plackett-Luce, of its documents in order of falling "
         "label: sum over ranks k of log(sum over ranks j >= k of exp(score_j)) - score_k. Mean over queries. A query's "
         "contribution does not depend on the other queries. All parameters of the model are used. No dropout.")


class Ranker(nn.Module):
    def __init__(self, vocabulary=24, width=16):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.inner = nn.Linear(width, width)
        self.score = nn.Linear(width, 1)

    def forward(self, ids):
        return self.score(torch.tanh(self.inner(self.embed(ids).mean(1)))).squeeze(-1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    counts = torch.tensor([5, 2, 3, 4])[torch.randperm(4, generator=g)]
    labels = torch.cat([torch.randperm(int(n), generator=g) for n in counts]).float()
    ids = torch.randint(1, 24, (int(counts.sum()), 6), generator=g)
    return {"model": Ranker(), "ids": ids, "labels": labels, "docs_per_query": counts}


def _matrices(logits, labels, counts):
    longest = int(counts.max())
    mask = torch.arange(longest) < counts[:, None]
    padded = torch.full(mask.shape, 1e-16).masked_scatter(mask, logits)
    order = torch.full(mask.shape, float("-inf")).masked_scatter(mask, labels).argsort(dim=1, descending=True, stable=True)
    return padded.gather(1, order), mask.gather(1, order)


def broken(model, batch):
    logits, mask = _matrices(model(batch["ids"]), batch["labels"], batch["docs_per_query"])
    scores = logits.exp()
    normalizer = scores.flip(1).cumsum(1).flip(1)
    log_probs = logits - (normalizer + 1e-10).log()
    log_probs = log_probs.masked_fill(~mask, 0.0)
    return -log_probs.sum(1).mean()


def right(model, batch):
    logits, mask = _matrices(model(batch["ids"]), batch["labels"], batch["docs_per_query"])
    scores = logits.exp().masked_fill(~mask, 0.0)
    normalizer = scores.flip(1).cumsum(1).flip(1)
    log_probs = logits - (normalizer + 1e-10).log()
    log_probs = log_probs.masked_fill(~mask, 0.0)
    return -log_probs.sum(1).mean()


if __name__ == "__main__":
    batch = make(0)
    model = batch.pop("model")
    scores, at, losses = model(batch["ids"]), 0, []
    for n in batch["docs_per_query"].tolist():
        s = scores[at:at + n][batch["labels"][at:at + n].argsort(descending=True)]
        losses.append(sum(s[k:].logsumexp(0) - s[k] for k in range(n)))
        at += n
    slow = torch.stack(losses).mean()
    b, r = broken(model, batch), right(model, batch)
    print("broken", b.item(), "right", r.item(), "slow", slow.item())
    assert abs(r - slow) < 1e-4 and abs(b - r) > 1e-2
