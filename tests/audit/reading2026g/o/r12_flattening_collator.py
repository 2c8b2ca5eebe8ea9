"""Padding-free collator. The whole batch becomes ONE row without attention mask; position ids start anew at each example and the first label of every example is -100, since the shift by one would otherwise teach the last token of one example to predict the next. transformers' DataCollatorWithFlattening."""
FAMILY = "data stages"
KIND = "collator"
INPUTS = {"rows": "list of {'input_ids': non-empty list, optional 'labels': list of the same length with -100 where not trained}"}
SETTINGS = {}
NOTES = ("Output: input_ids, labels, position_ids of shape [1, all tokens], cu_seqlens of shape [rows + 1]. No attention mask by design: the varlen kernel uses the starts (position_ids == 0 / cu_seqlens). Labels are not yet shifted; "
         "the loss shifts by one. -100 on the first token of each example loses nothing: it has no context inside its example. The number of rows of the output is always 1, so averages per row make no sense; the loss is the mean over trained tokens.")
import torch


def right(rows):
    ids, lab, pos, cu = [], [], [], [0]
    for r in rows:
        x = list(r["input_ids"])
        y = list(r.get("labels", x))
        ids += x
        lab += [-100] + y[1:]
        pos += range(len(x))
        cu.append(len(ids))
    t = lambda v: torch.tensor([v])
    return {"input_ids": t(ids), "labels": t(lab), "position_ids": t(pos), "cu_seqlens": torch.tensor(cu, dtype=torch.int32)}


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(5):
        x = torch.randint(1, 50, (int(torch.randint(1, 12, (1,), generator=g)),), generator=g).tolist()
        rows.append({"input_ids": x} if i % 2 else {"input_ids": x, "labels": [-100] * (len(x) // 3) + x[len(x) // 3:]})
    return {"rows": rows}


class Tiny(torch.nn.Module):
    """Causal mean over the own example, with positions."""
    def __init__(self):
        super().__init__()
        self.e, self.p, self.o = torch.nn.Embedding(50, 16), torch.nn.Embedding(16, 16), torch.nn.Linear(16, 50)

    def forward(self, ids, pos):
        seg = (pos == 0).cumsum(1)
        m = (seg[:, :, None] == seg[:, None]) & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        m = m.float() / m.sum(-1, keepdim=True)
        return self.o(torch.tanh(m @ (self.e(ids) + self.p(pos))))


if __name__ == "__main__":
    F = torch.nn.functional
    for seed in range(5):
        torch.manual_seed(seed)
        model, rows = Tiny(), make(seed)["rows"]
        o = right(rows)
        loss = F.cross_entropy(model(o["input_ids"], o["position_ids"])[0, :-1], o["labels"][0, 1:])
        total, n = 0, 0
        for r in rows:                                   # each example alone
            x = torch.tensor([r["input_ids"]])
            y = torch.tensor(r.get("labels", r["input_ids"]))[1:]
            if (y != -100).any():
                total = total + F.cross_entropy(model(x, torch.arange(x.shape[1])[None])[0, :-1], y, reduction="sum")
                n += (y != -100).sum().item()
        assert torch.allclose(loss, total / n, atol=1e-6), (loss, total / n)
        loss.backward()
        assert all(p.grad.norm() > 0 for p in model.parameters())
    print("flat loss", loss.item(), "loss of single examples", (total / n).item(), "starts", o["cu_seqlens"].tolist())
