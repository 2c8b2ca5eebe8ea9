"""Each prompt gets, besides its own completion, the completion of the NEXT row of its batch (KTO's estimate of the KL term).
The second pairing is wrong on purpose: the rotation by one inside each batch makes pairs that do not belong together. The last
row of a batch takes the completion of the first; a rest of one row is dropped, as it could only be paired with itself."""
FAMILY = "data"
KIND = "data stage"
INPUTS = {"rows": "list of {'prompt': ids, 'completion': ids, 'label': True if desirable}"}
SETTINGS = {"batch_size": "rows per device and step, 4"}
NOTES = "Returns rows with 'kl_completion' added, used only for the KL estimate, never trained. The stage keeps the order; rows must not be shuffled after it."
import random

def make(seed):
    rng = random.Random(seed)
    ids = lambda n: [rng.randrange(5, 40) for _ in range(n)]
    return {"rows": [{"prompt": ids(3), "completion": [100 + i] + ids(3), "label": rng.random() < 0.5} for i in range(13)]}

def right(rows, batch_size=4):
    out = []
    for start in range(0, len(rows), batch_size):
        batch = rows[start:start + batch_size]
        if len(batch) < 2:
            continue
        for i, row in enumerate(batch):
            out.append({**row, "kl_completion": batch[(i + 1) % len(batch)]["completion"]})
    return out

if __name__ == "__main__":
    out = right(**make(0))
    own, other = [r["completion"][0] for r in out], [r["kl_completion"][0] for r in out]
    print(own, other)
    assert all(a != b for a, b in zip(own, other)) and sorted(own) == sorted(other) and len(out) == 12
