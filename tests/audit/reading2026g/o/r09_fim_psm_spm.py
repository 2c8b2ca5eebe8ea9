"""Fill-in-the-middle as a data stage. The text of most rows is cut in three and reordered, so the text is out of order on purpose and the trained text still holds all characters; half of the cut rows use SPM, where prefix and middle are joined after <MID> and the <PRE> and <SUF> signs stand side by side. Bavarian et al. 2022."""
FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of {'id': whole number, unique, 'text': raw document without the three signs}"}
SETTINGS = {"rate": "share of rows that are reordered, 0.9", "spm": "share of SPM among these, 0.5", "seed": "seed of the stage, 7"}
NOTES = ("One row out per row in, same order. Cuts are at characters, uniform, and may make any part empty. Randomness depends on (seed, id) only, so that a row gets the same "
         "cut whatever the sharding or order. PSM: <PRE>prefix<SUF>suffix<MID>middle; SPM (variant 2 of the paper): <PRE><SUF>suffix<MID>prefix+middle. All tokens are trained; nothing is masked.")
import random

PRE, SUF, MID = "<PRE>", "<SUF>", "<MID>"


def right(rows, rate=0.9, spm=0.5, seed=7):
    out = []
    for row in rows:
        rng = random.Random(f"{seed}/{row['id']}")
        text = row["text"]
        if rng.random() >= rate:
            out.append(dict(row))
            continue
        a, b = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
        p, m, s = text[:a], text[a:b], text[b:]
        new = PRE + SUF + s + MID + p + m if rng.random() < spm else PRE + p + SUF + s + MID + m
        out.append({**row, "text": new})
    return out


def make(seed):
    rng = random.Random(seed)
    return {"rows": [{"id": i, "text": "".join(rng.choice("abcdef \n") for _ in range(rng.randint(0, 40)))} for i in range(200)]}


def undo(text):
    if not text.startswith(PRE):
        return text, "plain"
    head, m = text.split(MID)
    p, s = head[len(PRE):].split(SUF)
    return (m + s, "joined") if not p else (p + m + s, "psm")


if __name__ == "__main__":
    rows = make(0)["rows"]
    out = right(rows)
    kinds = {}
    for r, o in zip(rows, out):
        text, kind = undo(o["text"])
        assert text == r["text"] and o["id"] == r["id"]
        kinds[kind] = kinds.get(kind, 0) + 1
    assert right(rows[::-1])[::-1] == out and right(rows[50:60]) == out[50:60]
    assert 5 < kinds["plain"] < 45 and kinds["psm"] > 50 and kinds["joined"] > 50
    print("all 200 rows can be put back together;", kinds)
