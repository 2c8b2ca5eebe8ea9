"""UniMax: languages get equal shares until a small one would be repeated too often; what it cannot take goes to the larger ones.
Chung et al. 2023 (arXiv 2304.09151, umT5). The mixture is neither proportional nor by temperature: all large languages get the same number of rows however big they are, so most of a big language is never used, and each row of a
small language is repeated exactly `cap` times."""
import random

FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of {lang, id}, any order"}
SETTINGS = {"budget": "rows of the mixture, 240", "cap": "most epochs over a language, 3"}
NOTES = "Rows of small languages repeat on purpose (cap times); rows of large ones are cut. A language's rows are taken in their order, round after round. The length of the result is at most budget (shares are rounded down)."


def make(seed):
    rng = random.Random(seed)
    rows = [{"lang": lang, "id": f"{lang}{i}"} for lang, n in (("en", 400), ("de", 150), ("sw", 20), ("is", 7), ("tr", 70)) for i in range(n)]
    rng.shuffle(rows)
    return {"rows": rows}


def right(rows, budget=240, cap=3):
    by_lang = {}
    for row in rows:
        by_lang.setdefault(row["lang"], []).append(row)
    left, out = float(budget), []
    order = sorted(by_lang, key=lambda k: (len(by_lang[k]), k))
    for i, lang in enumerate(order):
        pool = by_lang[lang]
        share = min(left / (len(order) - i), cap * len(pool))
        left -= share
        out += [dict(pool[j % len(pool)], epoch=j // len(pool)) for j in range(int(share))]
    return out


if __name__ == "__main__":
    out = right(**make(0))
    count = {}
    for r in out:
        count[r["lang"]] = count.get(r["lang"], 0) + 1
    print(count, "total", len(out))
    # by hand: is 7*3 = 21; (240-21)/4 = 54.75 for sw (cap 60), tr, de and en
    assert count == {"is": 21, "sw": 54, "tr": 54, "de": 54, "en": 54} and len(out) <= 240
    assert max(r["epoch"] for r in out) == 2 and all(r["epoch"] == 0 for r in out if r["lang"] in ("en", "de", "tr"))
