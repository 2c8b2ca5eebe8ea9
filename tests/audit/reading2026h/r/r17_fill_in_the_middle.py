"""Half of the texts are put out of order. Fill-in-the-middle (Bavarian et al., arXiv 2207.14255): a text is cut at two
random characters and stored as <PRE>prefix<SUF>suffix<MID>middle (PSM) or, as often, <PRE><SUF>suffix<MID>prefix+middle
(SPM, in which prefix and middle stay joined and <PRE> is followed by <SUF> at once). Every character remains, all of them
are trained, and the cut may fall inside a word."""
import random

FAMILY = "data"
KIND = "data stage"
INPUTS = {"rows": "list of rows: uid (int), text (str without the marks <PRE>, <SUF>, <MID>)"}
SETTINGS = {"rate": "part of the texts that is transformed, 0.5", "spm": "part of those in SPM order, 0.5",
            "seed": "seed of the stage, 17"}
NOTES = ("One row out per row in, order and uid kept. The choice depends on (seed, uid) only. An empty prefix, middle or "
         "suffix is possible. The original text can be put together again from the marks.")


def make(seed):
    rng = random.Random(seed)
    words = "def return value for index in range list total print while true import".split()
    return {"rows": [{"uid": 1000 * seed + i, "text": " ".join(rng.choice(words) for _ in range(rng.randint(3, 9)))}
                     for i in range(24)]}


def right(rows, rate=0.5, spm=0.5, seed=17):
    out = []
    for r in rows:
        rng = random.Random(f"{seed}-{r['uid']}")
        text = r["text"]
        if rng.random() < rate:
            a, b = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
            pre, mid, suf = text[:a], text[a:b], text[b:]
            if rng.random() < spm:
                text = "<PRE><SUF>" + suf + "<MID>" + pre + mid
            else:
                text = "<PRE>" + pre + "<SUF>" + suf + "<MID>" + mid
        out.append({**r, "text": text})
    return out


if __name__ == "__main__":
    c = make(0)
    o = right(**c)
    kinds = {"plain": 0, "psm": 0, "spm": 0}
    for x, y in zip(c["rows"], o):
        t = y["text"]
        if not t.startswith("<PRE>"):
            kinds["plain"] += 1
        else:
            pre, rest = t[5:].split("<SUF>")
            suf, mid = rest.split("<MID>")
            kinds["spm" if t.startswith("<PRE><SUF>") else "psm"] += 1
            t = pre + mid + suf
        assert t == x["text"] and x["uid"] == y["uid"]
    print(kinds)
    print(o[0]["text"], "|", next(r["text"] for r in o if r["text"].startswith("<PRE><SUF>")))
    assert min(kinds.values()) > 0
