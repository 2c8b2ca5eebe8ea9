"""logits_to_keep: a sparse mask is turned into a count and read as a suffix. modelscope/ms-swift#10186, https://github.com/modelscope/ms-swift/pull/10186, 2026.
With one row per batch, labels were compressed with a sparse mask (several assistant turns with gaps), and the mask was
then converted to its count because the backend takes an integer. The backend reads the integer as "the last n
positions", so labels of earlier turns were paired with logits of later positions."""
import torch
import torch.nn as nn
import torch.nn.functional as F
FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "token ids, [1, time]", "labels": "ids at the tokens of all assistant turns, -100 elsewhere (user turns lie between), aligned with ids, [1, time]"}
SETTINGS = {}
NOTES = ("Cross-entropy, mean over trained tokens. The backend computes logits only for the last n positions (logits_to_keep=n). "
         "Labels are shifted inside the loss. Needs exactly one row. All parameters are used.")

class Tiny(nn.Module):
    def __init__(self, vocab=31, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(1, 31, (1, 24)); labels = torch.full_like(ids, -100)
    for a, e in ((4, 8), (12, 15), (19, 23)):
        labels[0, a:e] = ids[0, a:e]
    return {"model": Tiny(), "ids": ids, "labels": labels}

def backend(model, ids, logits_to_keep):
    h = model.rnn(model.emb(ids))[0]
    return model.head(h[:, -logits_to_keep:])

def shifted_ce(logits, labels):
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=-100)

def broken(model, batch):
    labels = batch["labels"]
    keep = (labels != -100)[0]
    labels = F.pad(labels[:, keep], (1, 0), value=-100)
    keep = F.pad(keep[1:], (0, 1), value=True)
    n = int(keep.sum())
    logits = backend(model, batch["ids"], n)
    return shifted_ce(logits, labels[:, :n])

def right(model, batch):
    labels = batch["labels"]
    first = int((labels != -100)[0].nonzero()[0])
    n = labels.shape[1] - first + 1
    logits = backend(model, batch["ids"], n)
    return shifted_ce(logits, labels[:, -n:])

if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    ref = shifted_ce(m(b["ids"]), b["labels"])
    print("broken", broken(m, b).item(), "right", right(m, b).item(), "full logits", ref.item())
    assert torch.allclose(right(m, b), ref) and (broken(m, b) - ref).abs() > 1e-4
    one = dict(b); one["labels"] = b["labels"].clone(); one["labels"][:, :19] = -100; one["ids"] = b["ids"][:, :23]; one["labels"] = one["labels"][:, :23]
    print("a single last turn: broken", broken(m, one).item(), "right", right(m, one).item())
