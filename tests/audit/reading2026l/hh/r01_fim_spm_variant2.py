"""Fill-in-the-middle with joint PSM / SPM-variant-2 (Bavarian et al. 2022, arXiv 2207.14255; bigcode santacoder-finetuning fim.py). In the SPM
form <PRE> is directly followed by <SUF>, and the prefix stands between <MID> and the middle without a sentinel of its own."""
FAMILY = "data stages, collators and chat templates"
KIND = "data stage"
INPUTS = {"rows": "list of {'ids': list of token ids >= 4}, one document each"}
SETTINGS = {"fim_rate": "probability that a document is transformed, 0.9", "spm_rate": "probability of the SPM form among the transformed, 0.5", "seed": "0"}
NOTES = """(rows) -> rows {'ids', 'form'}; one row per document, in order. Each document is cut at two uniformly drawn places (0 ... length, may coincide,
so that parts may be empty) into prefix, middle, suffix. PSM: <PRE> prefix <SUF> suffix <MID> middle. SPM, variant 2 of the FIM paper:
<PRE> <SUF> suffix <MID> prefix middle: the prefix comes after <MID> on purpose, so that prefix and middle are contiguous and PSM training
transfers. Untransformed documents are kept as they are. All forms end with <EOT>. Every token of the document occurs exactly once in the row,
all tokens are trained (no loss mask), including prefix and suffix. Sentinels: PRE 0, MID 1, SUF 2, EOT 3."""
import random
PRE, MID, SUF, EOT = 0, 1, 2, 3


def make(seed):
    r = random.Random(seed)
    return {"rows": [{"ids": [r.randint(4, 40) for _ in range(r.randint(1, 12))]} for _ in range(12)]}


def right(rows, fim_rate=0.9, spm_rate=0.5, seed=0):
    r, out = random.Random(seed), []
    for row in rows:
        x = row["ids"]
        if r.random() >= fim_rate:
            out.append({"ids": x + [EOT], "form": "plain"})
            continue
        a, b = sorted((r.randint(0, len(x)), r.randint(0, len(x))))
        pre, mid, suf = x[:a], x[a:b], x[b:]
        if r.random() < spm_rate:
            out.append({"ids": [PRE, SUF] + suf + [MID] + pre + mid + [EOT], "form": "spm"})
        else:
            out.append({"ids": [PRE] + pre + [SUF] + suf + [MID] + mid + [EOT], "form": "psm"})
    return out


if __name__ == "__main__":
    x = make(0)
    out = right(**x)
    for row, o in zip(x["rows"], out):
        y = o["ids"][:-1]
        if o["form"] == "psm":
            y = y[1:y.index(SUF)] + y[y.index(MID) + 1:] + y[y.index(SUF) + 1:y.index(MID)]
        elif o["form"] == "spm":
            y = y[y.index(MID) + 1:] + y[2:y.index(MID)]
        assert y == row["ids"], o
    print([o["form"] for o in out], "all documents recovered;", out[0]["ids"], out[1]["ids"])
