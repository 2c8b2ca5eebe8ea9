"""Gradient accumulation with one divisor for the whole window. Micro-batch losses are SUMS, all divided by the trained tokens of the
complete window (counted before the first backward), and never by the number of micro-batches; the last, shorter window also steps."""
FAMILY = "updates"
KIND = "update"
INPUTS = {"batches": "list of micro-batches, each a dict of ids [rows, time] and loss_mask [rows, time], of different sizes"}
SETTINGS = {"window": "micro-batches per optimizer step, 3", "max_norm": "gradient norm clip, 1.0"}
NOTES = ("Each step equals one step on the concatenation of its window: mean over trained tokens of all rows of the window. The final window may be "
         "shorter. Windows without any trained token make no step. Gradients are set to None at the end.")
import torch
import torch.nn as nn
import torch.nn.functional as F


class LM(nn.Module):
    """Tiny causal language model."""
    def __init__(self, vocab=24, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def hidden(self, ids):
        return self.rnn(self.emb(ids))[0]

    def forward(self, ids):
        return self.head(self.hidden(ids))


def token_logps(model, ids):
    """log-probability of ids[:, 1:], shape [rows, time - 1]."""
    lp = model(ids[:, :-1]).log_softmax(-1)
    return lp.gather(-1, ids[:, 1:, None]).squeeze(-1)


def random_rows(n=6, t=12, vocab=24):
    """Right-padded rows: a prompt, trained tokens, then padding (id 0)."""
    ids = torch.randint(1, vocab, (n, t))
    mask = torch.zeros(n, t)
    for i in range(n):
        start, end = int(torch.randint(2, 5, ())), int(torch.randint(6, t + 1, ()))
        mask[i, start:end] = 1.0
        ids[i, end:] = 0
    return ids, mask


def make(seed):
    torch.manual_seed(seed)
    model = LM()
    batches = []
    for n in (2, 5, 1, 4, 3):
        ids, mask = random_rows(n)
        batches.append({"ids": ids, "loss_mask": mask})
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2), "batches": batches}


def right(model, optimizer, batches, window=3, max_norm=1.0):
    for a in range(0, len(batches), window):
        part = batches[a:a + window]
        tokens = sum(float(b["loss_mask"][:, 1:].sum()) for b in part)
        if tokens == 0:
            continue
        optimizer.zero_grad(set_to_none=True)
        for b in part:
            logp = token_logps(model, b["ids"])
            (-(logp * b["loss_mask"][:, 1:]).sum() / tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    d, e = make(0), make(0)
    right(d["model"], d["optimizer"], d["batches"])
    for part in (e["batches"][:3], e["batches"][3:]):
        ids, mask = (torch.cat([b[k] for b in part]) for k in ("ids", "loss_mask"))
        e["optimizer"].zero_grad()
        loss = -(token_logps(e["model"], ids) * mask[:, 1:]).sum() / mask[:, 1:].sum()
        loss.backward()
        nn.utils.clip_grad_norm_(e["model"].parameters(), 1.0)
        e["optimizer"].step()
    gap = max(float((a - b).abs().max()) for a, b in zip(d["model"].parameters(), e["model"].parameters()))
    moved = max(float((a - b).abs().max()) for a, b in zip(d["model"].parameters(), make(0)["model"].parameters()))
    print("difference to whole-batch steps %.2e, parameters moved by %.4f" % (gap, moved))
    assert gap < 1e-4 and moved > 1e-3
