"""Fill-in-the-middle rows (Bavarian et al. 2022, arXiv 2207.14255; StarCoder, Code Llama). A part of the documents is cut at two places and its parts are reordered; in the joint SPM form the prefix sentinel stands
before the suffix sentinel with nothing between them and the prefix follows the middle sentinel. Text order looks scrambled, and rows with the same text come out differently."""
import hashlib

FAMILY = "data stages, collators and chat templates"
KIND = "data stage"
INPUTS = {"rows": "list of documents, each {'id': int, 'text': str}; the text has no sentinel in it"}
SETTINGS = {"fim_rate": "share of documents that are transformed, 0.6", "spm_rate": "share of the transformed ones in SPM form, 0.5", "seed": "seed of the stage, 17"}
NOTES = (
    "Fill-in-the-middle on characters. Output: one row {'id', 'text'} per input row, same order. With probability fim_rate a text is cut at two places (drawn uniformly from 0..len, sorted) into prefix, middle, suffix, any of which may be empty, and written as <PRE>prefix<SUF>suffix<MID>middle (PSM) or, with probability spm_rate, as "
    "<PRE><SUF>suffix<MID>prefix+middle (joint SPM, where the prefix follows <MID> directly); otherwise it stays as it is. No character is lost or added but the sentinels. The draws depend on (seed, id) only, so neither the order of the rows nor the process that handles them changes a row. All tokens are trained later on."
)
PRE, SUF, MID = "<PRE>", "<SUF>", "<MID>"


def make(seed):
    texts = ["def f(x):\n    return x + 1\n", "for i in range(3):\n    print(i)\n", "a = [1, 2]\n", "import os\nos.getcwd()\n"]
    return {"rows": [{"id": 100 * seed + i, "text": texts[i % 4] * (1 + i // 4)} for i in range(12)]}


def _draw(seed, ident, name):
    h = hashlib.sha256(("%d/%d/%s" % (seed, ident, name)).encode()).digest()
    return int.from_bytes(h[:8], "big") / 2 ** 64


def right(rows, fim_rate=0.6, spm_rate=0.5, seed=17):
    out = []
    for row in rows:
        text, u = row["text"], lambda name: _draw(seed, row["id"], name)
        if u("fim") < fim_rate:
            a, b = sorted(int(u(n) * (len(text) + 1)) for n in ("cut1", "cut2"))
            pre, mid, suf = text[:a], text[a:b], text[b:]
            text = PRE + SUF + suf + MID + pre + mid if u("spm") < spm_rate else PRE + pre + SUF + suf + MID + mid
        out.append({"id": row["id"], "text": text})
    return out


if __name__ == "__main__":
    for s in range(3):
        rows = make(s)["rows"]
        out = right(rows)
        kinds = []
        for r, o in zip(rows, out):
            t = o["text"]
            if not t.startswith(PRE):
                kinds.append("plain")
                assert t == r["text"]
                continue
            head, rest = t[len(PRE):].split(SUF)
            suf, tail = rest.split(MID)
            kinds.append("psm" if head else "spm/empty")
            assert head + tail + suf == r["text"]
        print("seed", s, kinds)
        assert right(rows[::-1])[::-1] == out and len(set(kinds)) > 1
    many = right([{"id": i, "text": "abcdefgh"} for i in range(4000)])
    share = sum(o["text"].startswith(PRE) for o in many) / 4000
    spm = sum(o["text"].startswith(PRE + SUF) and not o["text"].endswith(MID) for o in many) / 4000
    print("transformed %.3f" % share)
    assert abs(share - 0.6) < 0.03
