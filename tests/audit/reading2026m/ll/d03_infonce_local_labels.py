"""InfoNCE over gathered embeddings with rank-local labels. modelscope/ms-swift#10069,
https://github.com/modelscope/ms-swift/pull/10069, 2026. The Megatron InfoNCE loss gathered the embeddings of the data-parallel group but
split them into samples with the boundaries (labels) of the own rank only. So each rank parsed the head of the gathered tensor: other
ranks' examples were dropped, and with different numbers of negatives anchors, positives and negatives were assigned wrongly."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "sharding and reductions over ranks"
KIND = "loss"
INPUTS = {
    "ids": "sentences of every rank, [ranks, sentences, time]; on a rank the sentences are laid out sample after sample, each sample as anchor, positive, then its negatives",
    "labels": "[ranks, entries], one entry for every sentence that is not an anchor, in the same order: 1 for the positive (opens a sample), 0 for a negative",
}
SETTINGS = {"temperature": "similarities are divided by it, 0.1"}
VALUES = {"temperature": 0.1}
NOTES = """Contrastive loss with the negatives of the whole data-parallel group. The embeddings of all ranks are gathered in rank order (with
gradient) and cut into samples; sample i has an anchor, one positive and its negatives (their number may differ from sample to sample and
rank to rank). For an anchor the candidates are the positives and negatives of ALL samples of all ranks; the target is its own positive.
Embeddings are L2-normalised. Loss: mean of the cross-entropy over all anchors of all ranks; every rank computes this same value, and the
function returns the mean over the ranks. The result equals the loss of one process that holds all samples. Anchors are never candidates.
All parameters of the model are used. Any number of ranks; all ranks have equally many sentences."""


class Encoder(nn.Module):
    def __init__(self, vocab=31, width=12):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.out = nn.Linear(width, width)

    def forward(self, ids):
        return F.normalize(self.out(self.emb(ids).mean(-2)), dim=-1)


def make(seed):
    torch.manual_seed(seed)
    negatives = [[2, 3], [3, 2]]
    labels = torch.tensor([[x for n in rank for x in [1] + [0] * n] for rank in negatives])
    ids = torch.randint(0, 31, (2, labels.shape[1] + 2, 5))
    return {"model": Encoder(), "ids": ids, "labels": labels}


def _split(sentences, labels):
    """Cut [n, width] into samples; a sample is anchor + its run of labels (1 0 0 ...)."""
    starts = torch.nonzero(labels).flatten().tolist() + [len(labels)]
    cuts = [s + i for i, s in enumerate(starts)]
    return [sentences[a:b] for a, b in zip(cuts[:-1], cuts[1:])]


def _infonce(sentences, labels, temperature):
    samples = _split(sentences, labels)
    anchors = torch.stack([s[0] for s in samples])
    candidates = torch.cat([s[1:] for s in samples])
    target, at = [], 0
    for s in samples:
        target.append(at)
        at += len(s) - 1
    return F.cross_entropy(anchors @ candidates.T / temperature, torch.tensor(target))


def broken(model, batch, temperature=0.1):
    gathered = torch.cat([model(ids) for ids in batch["ids"]])
    return torch.stack([_infonce(gathered, labels, temperature) for labels in batch["labels"]]).mean()


def right(model, batch, temperature=0.1):
    gathered = torch.cat([model(ids) for ids in batch["ids"]])
    labels = torch.cat(list(batch["labels"]))
    return torch.stack([_infonce(gathered, labels, temperature) for _ in batch["labels"]]).mean()


if __name__ == "__main__":
    for f in (broken, right):
        b = make(0); m = b.pop("model")
        loss = f(m, b, **VALUES); loss.backward()
        used = m.emb.weight.grad.abs().sum(1) > 0
        only1 = torch.tensor(sorted(set(b["ids"][1].flatten().tolist()) - set(b["ids"][0].flatten().tolist())))
        print(f.__name__, loss.item(), "tokens that only rank 1 has get a gradient:", used[only1].tolist())
    b = make(0); m = b.pop("model")
    e = torch.cat([m(x) for x in b["ids"]]); lab = [[2, 3], [3, 2]]
    anc, cand, tgt, at = [], [], [], 0
    for n in [x for r in lab for x in r]:
        anc.append(e[at]); tgt.append(len(cand)); cand += [e[at + 1 + j] for j in range(n + 1)]; at += n + 2
    ref = -sum(torch.log_softmax(torch.stack([a @ c for c in cand]) / 0.1, 0)[t] for a, t in zip(anc, tgt)) / len(anc)
    print("right == explicit loop", bool(torch.allclose(ref, right(m, b, **VALUES), atol=1e-5)))
