"""On-policy distillation divides by the tokens of the wrong completions, counted several times. huggingface/trl#6452 (fixed by #6478), https://github.com/huggingface/trl/pull/6452, 2026.
The loader yields the same generation batch once per accumulation step, and Trainer counts num_items_in_batch from these raw batches, before the completions of the
data set are replaced by the student's own. The divergence is summed over generated tokens but divided by accumulation_steps times the token number of
the data set's completions, so loss and gradient are silently scaled down."""
import torch, torch.nn as nn
FAMILY = "distillation"
KIND = "update"
INPUTS = {"model": "the student, a causal language model: ids [n, time] -> logits", "optimizer": "plain SGD with step 0.5 over the student's parameters",
          "batches": "list with one entry per accumulation step; the loader repeats the same generation batch, so every entry is the same dict: labels [rows, time] (completion of the data set, -100 elsewhere), gen_ids [rows, time] (prompt and the student's sampled completion), gen_labels [rows, time] (sampled completion tokens, not shifted, -100 elsewhere), teacher_logits [rows, time, vocab] at gen_ids"}
SETTINGS = {}
NOTES = ("One optimizer step of on-policy distillation with gradient accumulation over G = len(batches) micro-steps. Micro-step k trains on the k-th of G equal slices of the rows of the generation batch. "
         "The objective of the whole step is the sum over all sampled completion tokens of all rows of KL(student || teacher) (reverse KL over the full vocabulary, logits at t-1 for the token at t), divided by the number of these sampled completion tokens in all slices together. "
         "So the update equals the one of a single pass over all rows, whatever G is. The teacher is constant; the completions of the data set play no part in the loss.")

class LM(nn.Module):
    def __init__(self, vocab=23, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)
    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def make(seed):
    torch.manual_seed(seed)
    model, R, T, G = LM(), 6, 10, 3
    def lab(ids, ends):
        m = torch.full_like(ids, -100)
        for r, e in enumerate(ends):
            m[r, 3:e] = ids[r, 3:e]
        return m
    data, gen = torch.randint(1, 23, (R, T)), torch.randint(1, 23, (R, T))
    b = {"labels": lab(data, [8, 7, 9, 6, 8, 7]), "gen_ids": gen, "gen_labels": lab(gen, [10, 9, 7, 9, 10, 8]), "teacher_logits": 2 * torch.randn(R, T, 23)}
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": [b] * G}

def _rkl_sum(model, ids, labels, teacher):
    s = model(ids)[:, :-1].log_softmax(-1)
    t = teacher[:, :-1].log_softmax(-1)
    kl = (s.exp() * (s - t)).sum(-1)
    return (kl * (labels[:, 1:] != -100)).sum()

def _step(model, optimizer, batches, num_items):
    G = len(batches)
    optimizer.zero_grad()
    for k, b in enumerate(batches):
        ids, lab, t = (b[n].chunk(G)[k] for n in ("gen_ids", "gen_labels", "teacher_logits"))
        (_rkl_sum(model, ids, lab, t) / num_items).backward()
    optimizer.step()

def broken(model, optimizer, batches):
    num_items = sum((b["labels"] != -100).sum() for b in batches)
    _step(model, optimizer, batches, num_items)

def right(model, optimizer, batches):
    G = len(batches)
    num_items = sum((b["gen_labels"].chunk(G)[k] != -100).sum() for k, b in enumerate(batches))
    _step(model, optimizer, batches, num_items)

if __name__ == "__main__":
    res = {}
    for f in (broken, right):
        d = make(0); w0 = d["model"].head.weight.detach().clone(); f(**d); res[f.__name__] = d["model"].head.weight.detach() - w0
    d = make(0); b = d["batches"][0]; w0 = d["model"].head.weight.detach().clone()
    (_rkl_sum(d["model"], b["gen_ids"], b["gen_labels"], b["teacher_logits"]) / (b["gen_labels"] != -100).sum()).backward(); d["optimizer"].step()
    ref = d["model"].head.weight.detach() - w0
    print("step norms: one pass", ref.norm().item(), {k: v.norm().item() for k, v in res.items()})
    assert torch.allclose(res["right"], ref, atol=1e-6) and not torch.allclose(res["broken"], ref, rtol=0.1)
