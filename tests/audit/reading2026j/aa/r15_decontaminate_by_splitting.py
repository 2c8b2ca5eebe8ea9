"""GPT-3 decontamination (Brown et al. 2020, appendix C): a training document that shares an n-gram with a benchmark is not dropped; the n-gram and a window of characters around it are cut out and
the rest lives on as several documents. Short pieces go, a document in too many pieces goes, and an n-gram that many documents hold is no contamination."""
FAMILY = "data stages and collators"
KIND = "data stage"
INPUTS = {"rows": "list of dicts: 'id', 'text'"}
SETTINGS = {"n": "length of an n-gram in words, 4 (paper: 13)", "window": "characters cut on both sides, 15 (paper: 200)", "shortest": "shortest piece in characters that is kept, 15 (paper: 200)",
            "pieces": "largest number of pieces, 3 (paper: 10)", "common": "n-grams in more training documents than this are ignored, 5 (paper: 10)"}
NOTES = ("The output may have more or fewer rows than the input, in the order of the input; each has 'id', 'piece', 'text'. Words may be cut at the edge of the window, as in the paper. Needs all rows at once (document counts). "
         "Words are lower-cased \\w+ runs. Pieces are counted before the short ones are dropped; empty pieces at the ends are not counted. A clean document passes unchanged whatever its length. Does not work on the benchmark itself.")
import random
import re
from collections import Counter

BENCHMARK = ["the old harbour clock stopped at seven past nine on friday", "which river crosses the town of three bridges twice"]


def _grams(text, n):
    w = [(m.group().lower(), m.start(), m.end()) for m in re.finditer(r"\w+", text)]
    return [(tuple(x[0] for x in w[i:i + n]), w[i][1], w[i + n - 1][2]) for i in range(len(w) - n + 1)]


def right(rows, n=4, window=15, shortest=15, pieces=3, common=5):
    bad = {g for text in BENCHMARK for g, _, _ in _grams(text, n)}
    held = Counter()
    for row in rows:
        held.update({g for g, _, _ in _grams(row["text"], n)} & bad)
    bad = {g for g in bad if held[g] <= common}
    out = []
    for row in rows:
        text, cuts = row["text"], []
        for g, a, b in _grams(text, n):
            if g in bad:
                a, b = max(0, a - window), min(len(text), b + window)
                if cuts and a <= cuts[-1][1]:
                    cuts[-1][1] = max(b, cuts[-1][1])
                else:
                    cuts.append([a, b])
        if not cuts:
            out.append({"id": row["id"], "piece": 0, "text": text})
            continue
        edges = [0] + [e for cut in cuts for e in cut] + [len(text)]
        parts = [text[a:b] for a, b in zip(edges[::2], edges[1::2]) if b > a]
        if len(parts) > pieces:
            continue
        out += [{"id": row["id"], "piece": k, "text": p} for k, p in enumerate(parts) if len(p) >= shortest]
    return out


def make(seed):
    r = random.Random(seed)
    words = "sand boat lamp corn wall gate milk road drum leaf sail coal".split()
    rows = []
    for i in range(14):
        text = " ".join(r.choice(words) for _ in range(r.randint(2, 30)))
        for _ in range(r.choice([0, 0, 1, 1, 2, 5])):
            b = r.choice(BENCHMARK).split()
            k = r.randint(0, len(b) - 4)
            text += " " + " ".join(b[k:k + r.randint(3, 6)]).title() + " " + " ".join(r.choice(words) for _ in range(r.randint(3, 25)))
        rows.append({"id": i, "text": text})
    if seed % 2:                                    # a phrase that everybody uses
        rows = [dict(row, text=row["text"] + ". Which river crosses the") for row in rows]
    return {"rows": rows}


if __name__ == "__main__":
    more = fewer = 0
    for seed in range(60):
        rows = make(seed)["rows"]
        out = right(rows)
        # slow twin: mark characters one by one
        grams = set()
        for t in BENCHMARK:
            w = t.split()
            grams |= {" ".join(w[i:i + 4]) for i in range(len(w) - 3)}
        plain = lambda s: " " + " ".join(re.findall(r"\w+", s.lower())) + " "
        grams = {g for g in grams if sum(" " + g + " " in plain(row["text"]) for row in rows) <= 5}
        want = []
        for row in rows:
            dead = set()
            for g in grams:
                for m in re.finditer(r"(?<!\w)(?=" + r"\W+".join(g.split()) + r"(?!\w))", row["text"].lower()):
                    end = re.compile(r"\W+".join(g.split())).match(row["text"].lower(), m.start()).end()
                    dead |= set(range(m.start() - 15, end + 15))
            keep, parts = [c not in dead for c in range(len(row["text"]))], []
            for c, ok in enumerate(keep):
                if ok:
                    if c == 0 or not keep[c - 1]:
                        parts.append("")
                    parts[-1] += row["text"][c]
            if not dead:
                want.append((row["id"], 0, row["text"]))
            elif len(parts) <= 3:
                want += [(row["id"], k, p) for k, p in enumerate(parts) if len(p) >= 15]
        assert [(o["id"], o["piece"], o["text"]) for o in out] == want, seed
        for o in out:
            assert not any(" " + g + " " in plain(o["text"]) for g in grams)
        ids = Counter(o["id"] for o in out)
        more += sum(v > 1 for v in ids.values())
        fewer += len(rows) - len(ids)
    assert more and fewer
    print("ok", more, "documents were split,", fewer, "were dropped")
