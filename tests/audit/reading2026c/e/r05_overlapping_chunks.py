"""Long documents are cut into windows that overlap by a context stretch. The overlapped tokens occur in two rows but are
trained in one of them only: in the later window they are context with label -100. Positions go on from the place in the
document and do not restart, and every token but the first of the document is a target exactly once."""
FAMILY = "packing"
KIND = "data stage"
INPUTS = {"rows": "list of dicts with ids (list of ints), documents of any length"}
SETTINGS = {"window": "tokens of a window, 12", "overlap": "context tokens repeated from the window before, 4 (< window)"}
NOTES = ("Returns rows with ids, labels (aligned with ids, -100 = not trained; the model shifts) and position_ids. Windows are "
         "not padded. Every document token except the first is a target exactly once over all windows.")
import random


def make(seed):
    rng = random.Random(seed)
    return {"rows": [{"ids": [rng.randrange(5, 40) for _ in range(n)]} for n in (9, 31, 12, 20)]}


def right(rows, window=12, overlap=4):
    out = []
    for row in rows:
        ids, start = row["ids"], 0
        while True:
            piece = ids[start:start + window]
            fresh = 1 if start == 0 else overlap
            out.append({"ids": piece, "labels": [-100] * fresh + piece[fresh:],
                        "position_ids": list(range(start, start + len(piece)))})
            if start + window >= len(ids):
                break
            start += window - overlap
    return out


if __name__ == "__main__":
    data = make(0)
    out = right(**data)
    print("windows", [(len(o["ids"]), o["position_ids"][0], sum(x != -100 for x in o["labels"])) for o in out])
    targets = sum(x != -100 for o in out for x in o["labels"])
    assert targets == sum(len(r["ids"]) - 1 for r in data["rows"])
    at = 0
    for row in data["rows"]:
        seen = {}
        while at < len(out) and (not seen or out[at]["position_ids"][0] > 0):
            for p, l in zip(out[at]["position_ids"], out[at]["labels"]):
                if l != -100:
                    assert p not in seen
                    seen[p] = l
            at += 1
        assert [seen[p] for p in sorted(seen)] == row["ids"][1:]
