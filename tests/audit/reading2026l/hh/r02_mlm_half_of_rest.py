"""MLM masking 80/10/10 as in transformers' DataCollatorForLanguageModeling: random words are drawn with probability 0.5 *of what is left* after the 80 %
(0.5 * 0.2 = 10 %), a line which is reported as a bug again and again (transformers#17377, #21803); the unchanged 10 % are trained as well."""
FAMILY = "data stages, collators and chat templates"
KIND = "collator"
INPUTS = {"rows": "list of {'input_ids': list of ids, starts with CLS 1, ends with SEP 2}"}
SETTINGS = {"mlm_probability": "share of the ordinary tokens which are trained, 0.15", "seed": "of the masking, 0"}
NOTES = """(rows) -> {input_ids, attention_mask, labels}, [rows, longest row], padded on the right with 0. Each ordinary token (not CLS, SEP or padding) is chosen
with probability mlm_probability, independently. Of the chosen ones 80 % are replaced by MASK (3), 10 % by a uniformly random id of the whole
vocabulary of 50 (special ids and the original id are possible), 10 % stay as they are. labels = original id at every chosen position (also where the
input is unchanged), -100 elsewhere; labels are not shifted (the model predicts the token at its own position). attention_mask is 1 on row tokens."""
import torch
PAD, CLS, SEP, MASK, VOCAB = 0, 1, 2, 3, 50


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"rows": [{"input_ids": [CLS] + torch.randint(4, VOCAB, (int(torch.randint(5, 30, (1,), generator=g)),), generator=g).tolist() + [SEP]} for _ in range(8)]}


def right(rows, mlm_probability=0.15, seed=0):
    g = torch.Generator().manual_seed(seed)
    n = max(len(r["input_ids"]) for r in rows)
    ids = torch.tensor([r["input_ids"] + [PAD] * (n - len(r["input_ids"])) for r in rows])
    attention_mask = (torch.arange(n)[None] < torch.tensor([len(r["input_ids"]) for r in rows])[:, None]).long()
    labels = ids.clone()
    prob = torch.full(ids.shape, mlm_probability).masked_fill((ids == CLS) | (ids == SEP) | (attention_mask == 0), 0.0)
    chosen = torch.bernoulli(prob, generator=g).bool()
    labels[~chosen] = -100
    replaced = torch.bernoulli(torch.full(ids.shape, 0.8), generator=g).bool() & chosen
    ids[replaced] = MASK
    random = torch.bernoulli(torch.full(ids.shape, 0.5), generator=g).bool() & chosen & ~replaced
    ids[random] = torch.randint(VOCAB, ids.shape, generator=g)[random]
    return {"input_ids": ids, "attention_mask": attention_mask, "labels": labels}


if __name__ == "__main__":
    rows = sum((make(s)["rows"] for s in range(400)), [])
    o = right(rows)
    n = max(len(r["input_ids"]) for r in rows)
    orig = torch.tensor([r["input_ids"] + [0] * (n - len(r["input_ids"])) for r in rows])
    c = o["labels"] != -100
    assert torch.equal(o["labels"][c], orig[c]) and torch.equal(o["input_ids"][~c], orig[~c])
    m, s = (o["input_ids"][c] == MASK).float().mean(), (o["input_ids"][c] == orig[c]).float().mean()
    p = c.sum() / (orig > 3).sum()
    print(f"chosen {p:.3f} (0.15), MASK {m:.3f} (0.80 + 0.10/50), unchanged {s:.3f} (0.10 + 0.10/50)")
    assert abs(p - .15) < .01 and abs(m - .802) < .02 and abs(s - .102) < .015
