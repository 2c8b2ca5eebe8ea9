"""Both responses of a pair are cut by the length of the longer one. huggingface/trl#6548,
https://github.com/huggingface/trl/issues/6548 (fix 6588), 2026. CPO / ORPO preprocessing sliced each response to
max_length - longer_response_length, which is not the room beside the prompt: responses that fit are cut, and when the
longer one exceeds max_length the bound is negative and cuts from the end, down to an empty response. The fix gives each
response its own budget max(0, max_length - len(prompt))."""
FAMILY = "data"
KIND = "data stage"
INPUTS = {"rows": "list of dicts with prompt, chosen, rejected (lists of token ids)"}
SETTINGS = {"max_length": "tokens of prompt plus response, 24"}
NOTES = ("Returns the rows with responses cut at the end so that prompt + response has at most max_length tokens; a "
         "response that fits is not touched. Prompts are shorter than max_length here.")
import random


def make(seed):
    rng = random.Random(seed)
    draw = lambda n: [rng.randrange(5, 40) for _ in range(n)]
    lengths = [(6, 10, 8), (8, 18, 5), (9, 14, 13), (5, 27, 12), (7, 4, 19)]
    return {"rows": [{"prompt": draw(p), "chosen": draw(c), "rejected": draw(r)} for p, c, r in lengths]}


def broken(rows, max_length=24):
    out = []
    for row in rows:
        row = dict(row)
        longer = max(len(row["chosen"]), len(row["rejected"]))
        for key in ("chosen", "rejected"):
            if len(row["prompt"]) + longer > max_length:
                row[key] = row[key][: max_length - longer]
        out.append(row)
    return out


def right(rows, max_length=24):
    out = []
    for row in rows:
        row = dict(row)
        budget = max(0, max_length - len(row["prompt"]))
        for key in ("chosen", "rejected"):
            row[key] = row[key][:budget]
        out.append(row)
    return out


if __name__ == "__main__":
    size = lambda rows: [(len(r["prompt"]), len(r["chosen"]), len(r["rejected"])) for r in rows]
    data = make(0)
    print("before", size(data["rows"]))
    print("broken", size(broken(**data)))
    print("right ", size(right(**data)))
    assert broken(**data) != right(**data)
