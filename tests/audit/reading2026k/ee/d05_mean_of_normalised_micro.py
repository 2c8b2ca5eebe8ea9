"""Metric already divided by the global token count is averaged over micro-batches. verl-project/verl#4778, https://github.com/verl-project/verl/pull/4778, 2026.
The policy loss of a micro-batch was already divided by the number of tokens of the whole mini-batch, so that the micro-batches add up;
the generic reduction of metrics took the mean over micro-batches, which divides once more by the number of gradient accumulation steps.
The logged actor/pg_loss changed with the micro-batch size while the training did not."""
import random

FAMILY = "metrics over ranks or micro-batches"
KIND = "metric over ranks"
INPUTS = {"parts": "list of micro-batches; each a dict with 'loss' (list of the per-token policy losses) and 'mask' (list, 1 where the token is trained)"}
SETTINGS = {}
NOTES = ("the logged number is the mean of the per-token loss over the trained tokens of all micro-batches together; it does not depend on how "
         "the rows are split in micro-batches or on their order; a micro-batch may have no trained token.")


def make(seed):
    rng = random.Random(seed)
    parts = []
    for n in (7, 4, 9):
        parts.append({"loss": [rng.gauss(0.3, 1.0) for _ in range(n)], "mask": [int(rng.random() < 0.7) for _ in range(n)]})
    return {"parts": parts}


def micro_values(parts):
    global_tokens = max(sum(sum(p["mask"]) for p in parts), 1)
    return [sum(l * m for l, m in zip(p["loss"], p["mask"])) / global_tokens for p in parts]


def broken(parts):
    values = micro_values(parts)
    return sum(values) / len(values)


def right(parts):
    return sum(micro_values(parts))


if __name__ == "__main__":
    case = make(0)
    flat = [(l, m) for p in case["parts"] for l, m in zip(p["loss"], p["mask"])]
    ref = sum(l for l, m in flat if m) / sum(m for _, m in flat)
    print("broken", broken(**case), "right", right(**case), "reference", ref)
    assert abs(right(**case) - ref) < 1e-9 and abs(broken(**case) - ref) > 1e-3
