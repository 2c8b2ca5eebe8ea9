"""Right: the last batch is filled with copies of its first row so that the ranks get equal numbers of rows. The copies have weight 0 and no labels, so a row occurs several times in the batch but counts once."""
import random
import torch

FAMILY = "data stages"
KIND = "collator"
INPUTS = {"rows": "list of {ids: token ids, labels: ids or -100}"}
SETTINGS = {"multiple": "the number of rows is filled up to a multiple of this, 4 (ranks times rows per rank)"}
NOTES = "Returns ids and labels (right padding 0 and -100), and weight, 1 for real rows and 0 for fill rows. The loss is sum of weighted token losses over the number of labelled tokens, so fill rows change nothing. Fill rows are real text so that no rank meets an empty row."

def make(seed):
    r = random.Random(seed)
    rows = []
    for _ in range(6):
        ids = [r.randint(1, 49) for _ in range(r.randint(3, 8))]
        rows.append({"ids": ids, "labels": [-100] + ids[1:]})
    return {"rows": rows}

def right(rows, multiple=4):
    fill = -len(rows) % multiple
    rows = list(rows) + [{"ids": rows[0]["ids"], "labels": [-100] * len(rows[0]["ids"])}] * fill
    width = max(len(r["ids"]) for r in rows)
    weight = torch.ones(len(rows))
    if fill:
        weight[-fill:] = 0
    return {"ids": torch.tensor([r["ids"] + [0] * (width - len(r["ids"])) for r in rows]),
            "labels": torch.tensor([r["labels"] + [-100] * (width - len(r["labels"])) for r in rows]), "weight": weight}

if __name__ == "__main__":
    made = make(0)
    out, plain = right(**made), right(made["rows"], multiple=1)
    torch.manual_seed(0)
    table = torch.nn.Embedding(50, 50)
    def loss(b):
        nll = torch.nn.functional.cross_entropy(table(b["ids"])[:, :-1].transpose(1, 2), b["labels"][:, 1:].clamp(min=0), reduction="none")
        mask = (b["labels"][:, 1:] >= 0) * b["weight"][:, None]
        return (nll * mask).sum() / mask.sum()
    a, b = loss(out), loss(plain)
    print("rows", len(made["rows"]), "->", len(out["ids"]), "loss", float(a.detach()), float(b.detach()))
    assert len(out["ids"]) == 8 and torch.allclose(a, b) and right(made["rows"][:4])["weight"].sum() == 4
