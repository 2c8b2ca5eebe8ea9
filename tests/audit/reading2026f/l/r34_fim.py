"""Fill-in-the-middle stage (Bavarian et al. 2022). Documents are cut at two places and written out of order, half as prefix-suffix-middle and half as suffix-prefix-middle, where
the SPM form begins with <PRE><SUF> on purpose; the choice comes from a hash of the row's id, not from a running generator, so it does not depend on order or worker."""
FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of dicts with id (str, unique) and text (str)"}
SETTINGS = {"rate": "share of rows rewritten, 0.5", "spm": "share of the rewritten rows in SPM form, 0.5"}
NOTES = ("One row in, one row out, same order; rows are new dicts and inputs are not changed. Deterministic per row id. Text shorter than 3 characters is left as it is. "
         "All characters are kept; only order and sentinels differ.")
import hashlib
import random

PRE, SUF, MID = "<PRE>", "<SUF>", "<MID>"


def make(seed):
    r = random.Random(seed)
    return {"rows": [{"id": "doc%d-%d" % (seed, i), "text": "".join(r.choice("abcdef ") for _ in range(r.randint(0, 20)))} for i in range(12)]}


def right(rows, rate=0.5, spm=0.5):
    out = []
    for row in rows:
        r = random.Random(hashlib.sha256(row["id"].encode()).digest())
        text = row["text"]
        if len(text) >= 3 and r.random() < rate:
            a, b = sorted(r.sample(range(len(text) + 1), 2))
            prefix, middle, suffix = text[:a], text[a:b], text[b:]
            if r.random() < spm:
                text = PRE + SUF + suffix + MID + prefix + middle
            else:
                text = PRE + prefix + SUF + suffix + MID + middle
        out.append({**row, "text": text})
    return out


if __name__ == "__main__":
    changed = forms = 0
    for seed in range(40):
        rows = make(seed)["rows"]
        out = right(rows)
        assert right(rows[::-1])[::-1] == out
        for a, b in zip(rows, out):
            t = b["text"]
            if t != a["text"]:
                changed += 1
                if t.startswith(PRE + SUF):
                    forms += 1
                suf = t.split(SUF)[1].split(MID)[0]
                body = t.split(MID)[1]
                pre = t.split(PRE)[1].split(SUF)[0]
                assert pre + body + suf == a["text"]
    print("rewritten", changed, "of", 480, "of which begin with <PRE><SUF>", forms)
    assert changed > 100
