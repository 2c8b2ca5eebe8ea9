"""Fill-in-the-middle: the text is cut in three and REORDERED to prefix, suffix, middle with sentinels (PSM, Bavarian et al. 2022); only some rows by a per-row hash, the others stay left-to-right. All tokens are trained, sentinels too."""
FAMILY = "data stage"; KIND = "data stage"
INPUTS = {"rows": "list of dict id (int), text (str)"}
SETTINGS = {"rate": "share of transformed rows, 0.5", "seed": "17"}
NOTES = "Choice and cuts depend on row id and seed only, never on order or batch. No character is lost. Number and order of rows unchanged."
import random
def make(seed):
    r = random.Random(seed); return {"rows": [{"id": i, "text": "".join(r.choice("abcdef \n") for _ in range(r.randrange(0, 20)))} for i in range(30)]}
def right(rows, rate=0.5, seed=17):
    out = []
    for row in rows:
        r = random.Random(f"{seed}-{row['id']}")
        if r.random() >= rate: out.append(dict(row)); continue
        t = row["text"]; a, b = sorted((r.randint(0, len(t)), r.randint(0, len(t))))
        out.append({**row, "text": "<PRE>" + t[:a] + "<SUF>" + t[b:] + "<MID>" + t[a:b] + "<EOT>"})
    return out
if __name__ == "__main__":
    rows = make(0)["rows"]; o = right(rows); n = 0
    for a, b in zip(rows, o):
        if b["text"].startswith("<PRE>"):
            n += 1; p, rest = b["text"][5:].split("<SUF>"); s, m = rest.split("<MID>"); assert p + m[:-5] + s == a["text"]
        else: assert a == b
    assert right(rows[::-1]) == o[::-1]; print("transformed", n, "of", len(rows)); assert 5 < n < 25
