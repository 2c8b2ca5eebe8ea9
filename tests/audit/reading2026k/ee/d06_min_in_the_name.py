"""The reduction of a metric is chosen by a substring of its name. verl-project/verl#7501, https://github.com/verl-project/verl/pull/7501, 2026.
reduce_metrics took the maximum if "max" occurs in the key, the minimum if "min" occurs, and else the mean. A key such as
"actor/minibatch_loss" contains "min", so the logged loss was the smallest value instead of the mean. Fixed by looking at the words of the key."""
import random
import re

FAMILY = "metrics over ranks or micro-batches"
KIND = "metric over ranks"
INPUTS = {"parts": "list with the value (float) that each rank reports for this metric"}
SETTINGS = {"key": "name of the metric, 'actor/minibatch_loss'"}
NOTES = ("each rank reports a mean over the same number of rows; the logged number is the mean over ranks, unless a word of the name (words are "
         "separated by / or _) is exactly 'max' or 'min', then the largest or smallest value. 'actor/minibatch_loss' is a mean.")


def make(seed):
    rng = random.Random(seed)
    return {"parts": [rng.uniform(0.5, 2.5) for _ in range(4)]}


def reduce(values, how):
    return {"max": max, "min": min, "mean": lambda v: sum(v) / len(v)}[how](values)


def broken(parts, key="actor/minibatch_loss"):
    how = "max" if "max" in key else "min" if "min" in key else "mean"
    return reduce(parts, how)


def right(parts, key="actor/minibatch_loss"):
    words = re.split(r"[/_]", key)
    how = "max" if "max" in words else "min" if "min" in words else "mean"
    return reduce(parts, how)


if __name__ == "__main__":
    case = make(0)
    print(case["parts"], "broken", broken(**case), "right", right(**case))
    assert abs(right(**case) - sum(case["parts"]) / 4) < 1e-12 and broken(**case) < right(**case)
    for key in ("critic/score/max", "critic/score_min"):
        assert broken(case["parts"], key) == right(case["parts"], key)
