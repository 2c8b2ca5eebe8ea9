"""Packing collator with 'square averaging' (InternVL 2.5): every trained token of a sample with n trained tokens weighs 1/sqrt(n), half-way between token mean and sample mean, so tokens in one packed row have different weights.
Rows are filled by best-fit decreasing, so the order of the samples changes; the loss is then sum(weight * nll) / sum(weight) over the whole batch."""
import torch
FAMILY = "packing and positions"
KIND = "collator"
INPUTS = {"rows": "list of dicts: input_ids (list of int), prompt_len (int >= 1; the tokens before it are not trained), 1 <= len <= max_len"}
SETTINGS = {"max_len": "tokens per packed row, 16", "pad_id": "padding id, 0"}
NOTES = ("Returns input_ids, labels (NOT shifted; -100 for prompts, padding and hence the first token of each sample), loss_weight (0 where the label is -100, otherwise n**-0.5 with n = trained tokens of the sample), position_ids (restart per sample), segment_ids (1.. per packed row, 0 = padding). "
         "The number of packed rows depends on the lengths. Every sample is kept whole and exactly once; a sample with no trained tokens is kept with weight 0. Deterministic.")

def make(seed):
    g = torch.Generator().manual_seed(seed); rows = []
    for i in range(9):
        n = int(torch.randint(2, 15, (1,), generator=g)); rows.append({"input_ids": torch.randint(1, 40, (n,), generator=g).tolist(), "prompt_len": int(torch.randint(1, n, (1,), generator=g))})
    rows.append({"input_ids": [7, 8], "prompt_len": 2})
    return {"rows": rows}

def right(rows, max_len=16, pad_id=0):
    bins = []                                                              # [free, [samples]]
    for r in sorted(rows, key=lambda r: -len(r["input_ids"])):              # stable sort
        n = len(r["input_ids"])
        fit = [b for b in bins if b[0] >= n]
        b = min(fit, key=lambda b: b[0]) if fit else None                  # best fit: the fullest that still takes it
        if b is None: b = [max_len, []]; bins.append(b)
        b[0] -= n; b[1].append(r)
    out = {"input_ids": [], "labels": [], "loss_weight": [], "position_ids": [], "segment_ids": []}
    for free, samples in bins:
        ids, lab, w, pos, seg = [], [], [], [], []
        for j, r in enumerate(samples, 1):
            x, p = r["input_ids"], r["prompt_len"]; n = len(x) - p
            ids += x; lab += [-100] * p + x[p:]; w += [0.0] * p + [n ** -0.5] * n if n else [0.0] * p
            pos += range(len(x)); seg += [j] * len(x)
        out["input_ids"].append(ids + [pad_id] * free); out["labels"].append(lab + [-100] * free); out["loss_weight"].append(w + [0.0] * free)
        out["position_ids"].append(pos + [0] * free); out["segment_ids"].append(seg + [0] * free)
    return {k: torch.tensor(v) for k, v in out.items()}

if __name__ == "__main__":
    rows = make(0)["rows"]; o = right(rows); torch.manual_seed(0); table = torch.randn(41, 41, requires_grad=True); lp = table.log_softmax(-1)   # a bigram model
    w = o["loss_weight"][:, 1:]; y = o["labels"][:, 1:].clamp(min=0); nll = -lp[o["input_ids"][:, :-1]].gather(-1, y[..., None])[..., 0]
    loss = (w * nll).sum() / w.sum(); loss.backward(); num = den = 0.0
    for r in rows:
        x, p = r["input_ids"], r["prompt_len"]; n = len(x) - p
        for t in range(p, len(x)): num += -lp[x[t - 1], x[t]].item() / n ** 0.5; den += 1 / n ** 0.5
    got = sorted(tuple(ids[s == j].tolist()) for ids, s in zip(o["input_ids"], o["segment_ids"]) for j in range(1, int(s.max()) + 1))
    print(loss.item(), num / den, "grad", table.grad.norm().item(), "packed", tuple(o["input_ids"].shape), "tokens", sum(len(r["input_ids"]) for r in rows))
    assert abs(loss.item() - num / den) < 1e-5 and got == sorted(tuple(r["input_ids"]) for r in rows) and table.grad.norm() > 0 and ((o["labels"] == -100) == (o["loss_weight"] == 0)).all()
