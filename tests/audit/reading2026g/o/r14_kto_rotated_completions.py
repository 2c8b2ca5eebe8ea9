"""KTO's mismatched completions. Every prompt is also paired with the completion of ANOTHER row (rotated by one within the batch), which looks like misaligned data; KTO needs such unrelated pairs to estimate its KL reference point (Ethayarajh et al. 2024, TRL's _get_kl_dataset)."""
FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of {'prompt': text, 'completion': text, 'label': True for a desirable one}"}
SETTINGS = {"batch": "rows per batch within which completions are rotated, 4"}
NOTES = ("Rows stay in order and gain 'kl_completion' = completion of the previous row of the same batch; the first gets the one of the last. prompt, completion and label stay together unchanged. The kl pair is only for the reference point, without gradient. "
         "Must run after shuffling, with the training's batch size. Needs batch >= 2 and a last batch of not exactly one row (raises). Adjacent rows with the same prompt give a matched pair by chance; that is accepted.")


def right(rows, batch=4):
    if batch < 2 or len(rows) % batch == 1:
        raise ValueError("a batch of one row cannot be rotated")
    out = []
    for s in range(0, len(rows), batch):
        part = rows[s:s + batch]
        for i, r in enumerate(part):
            out.append({**r, "kl_completion": part[i - 1]["completion"]})     # i = 0 -> the last row, intended
    return out


def make(seed):
    import random
    rng = random.Random(seed)
    return {"rows": [{"prompt": f"p{i}-{rng.randrange(99)}", "completion": f"c{i}", "label": rng.random() < 0.5} for i in range(14)]}


if __name__ == "__main__":
    rows = make(0)["rows"]
    out = right(rows)
    assert [{k: v for k, v in o.items() if k != "kl_completion"} for o in out] == rows
    got = [int(o["kl_completion"][1:]) for o in out]
    assert got == [3, 0, 1, 2, 7, 4, 5, 6, 11, 8, 9, 10, 13, 12], got
    assert all(o["kl_completion"] != o["completion"] for o in out) and sorted(got) == list(range(14))
    try:
        right(rows[:13]); raise SystemExit("no error")
    except ValueError as e:
        print("rotated:", got, "| 13 rows:", e)
