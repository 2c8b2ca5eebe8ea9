"""Completions are paired with the wrong prompts on purpose. KTO (arXiv 2402.01306, TRL's _get_kl_dataset) estimates its
reference point, the KL between policy and reference, from prompts with completions of other prompts: within a batch the
completions are rotated by one. The true pair stays in the row, next to the mismatched completion, which has no label."""
import random

FAMILY = "data"
KIND = "data stage"
INPUTS = {"rows": "list of rows: prompt (ids), completion (ids), label (True = desirable)"}
SETTINGS = {"batch_size": "rows per batch, 4; the rotation stays inside a batch"}
NOTES = ("Adds kl_completion to each row: the completion of the row before it in its batch (the first takes the last). prompt, "
         "completion and label unchanged, same rows, same order. A batch of one row keeps its own completion. The KL rows "
         "are used without gradient.")


def make(seed):
    rng = random.Random(seed)
    w = lambda: [rng.randint(1, 49) for _ in range(rng.randint(2, 6))]
    return {"rows": [{"prompt": w(), "completion": w(), "label": rng.random() < 0.5} for _ in range(10)]}


def right(rows, batch_size=4):
    out = []
    for i in range(0, len(rows), batch_size):
        batch = rows[i:i + batch_size]
        rotated = [batch[-1]["completion"]] + [r["completion"] for r in batch[:-1]]
        out += [{**r, "kl_completion": list(k)} for r, k in zip(batch, rotated)]
    return out


if __name__ == "__main__":
    c = make(0)
    o = right(**c)
    assert [{k: r[k] for k in ("prompt", "completion", "label")} for r in o] == c["rows"]
    for i in range(0, 10, 4):
        a, b = o[i:i + 4], c["rows"][i:i + 4]
        assert sorted(r["kl_completion"] for r in a) == sorted(r["completion"] for r in b)
        assert all(r["kl_completion"] != r["completion"] for r in a)
    print("each batch has the same completions, none with its own prompt:", [r["kl_completion"][:2] for r in o[:4]])
