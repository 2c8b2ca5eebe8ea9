"""Fill-in-the-middle transform (Bavarian et al. 2022; StarCoder, Megatron-LM fim dataset) with both orders. Half of the documents are cut at two random places and rearranged: PSM = <pre> prefix <suf> suffix <mid> middle, SPM variant = <pre> <suf> suffix <mid> prefix middle (the two markers next to each other are on purpose).
Tokens appear out of order and all of them are trained, the markers too. Random numbers come from the document's id, so the result does not depend on order or rank."""
import random

FAMILY = "data"
KIND = "data stage"
INPUTS = {"rows": "list of {'id': integer, 'input_ids': ids}"}
SETTINGS = {"rate": "share of rearranged documents, 0.5", "spm_rate": "share of the SPM order among them, 0.5", "seed": "0"}
NOTES = "Markers 1 <pre>, 2 <suf>, 3 <mid>, 4 end of document. Output has the same number of rows in the same order; a rearranged row has three tokens more. All tokens are targets. The end token 4 of the document stays last. Documents with fewer than 3 tokens are left alone."


def make(seed):
    r = random.Random(seed)
    return {"rows": [{"id": 1000 * seed + i, "input_ids": [r.randrange(10, 50) for _ in range(r.randrange(2, 14))] + [4]} for i in range(12)]}


def right(rows, rate=0.5, spm_rate=0.5, seed=0):
    out = []
    for row in rows:
        r = random.Random(f"{seed}-{row['id']}")
        body = row["input_ids"][:-1]
        if len(body) < 3 or r.random() >= rate:
            out.append(dict(row))
            continue
        a, b = sorted(r.sample(range(len(body) + 1), 2))
        prefix, middle, suffix = body[:a], body[a:b], body[b:]
        if r.random() < spm_rate:
            ids = [1, 2] + suffix + [3] + prefix + middle
        else:
            ids = [1] + prefix + [2] + suffix + [3] + middle
        out.append({**row, "input_ids": ids + [4]})
    return out


if __name__ == "__main__":
    rows = make(0)["rows"]
    out = right(rows)
    assert [o["id"] for o in out] == [r["id"] for r in rows] and out == right(rows) and right(rows[::-1]) == out[::-1]
    changed = 0
    for r, o in zip(rows, out):
        ids = o["input_ids"][:-1]
        if ids[:1] == [1]:
            changed += 1
            s, m = ids.index(2), ids.index(3)
            psm = ids[1:s] + ids[m + 1:] + ids[s + 1:m]
            assert psm == r["input_ids"][:-1], (r, o)   # prefix + middle + suffix, in both orders
    print("rows", len(out), "rearranged", changed)
    assert changed
