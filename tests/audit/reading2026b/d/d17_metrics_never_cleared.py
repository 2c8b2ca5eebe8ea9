"""The list behind the logged reward is never emptied, so each log entry is a mean since the start of training.
modelscope/ms-swift#9884, https://github.com/modelscope/ms-swift/pull/9884, 2026 (August).
MegatronGRPOTrainer appends reward and clip metrics for every rollout and averages the list at each
log event, but does not clear it. Later entries mix the present window with all earlier rollouts; the
curve lags behind and gets smoother the longer the run is."""
import random

FAMILY = 'metrics'
KIND = 'metric over ranks'
INPUTS = {
    'parts': 'list of per-rank dicts: windows = list of log windows, each a list of the rewards of the samples of that rank in that window',
}
SETTINGS = {}
NOTES = (
    'The reward logged at the last log event: mean over all samples of all ranks since the event '
    'before it. Ranks may have unequal numbers of samples. single(...) is the same on one process. '
)


def make(seed):
    g = random.Random(seed)
    parts = []
    for _ in range(3):
        windows = []
        for w in range(5):                                  # the reward rises during training
            windows.append([0.15 * w + 0.3 * g.random() for _ in range(g.randint(2, 6))])
        parts.append({"windows": windows})
    return {"parts": parts}


class Metrics:
    def __init__(self, ranks):
        self.values = [{"reward": []} for _ in range(ranks)]

    def append(self, rank, value):
        self.values[rank]["reward"].append(value)

    def log(self):
        total = sum(sum(v["reward"]) for v in self.values)   # all_reduce of sums and counts
        count = sum(len(v["reward"]) for v in self.values)
        return total / count

    def clear(self):
        for v in self.values:
            v["reward"] = []


def _run(parts, clear):
    metrics, logged = Metrics(len(parts)), None
    for w in range(len(parts[0]["windows"])):
        for rank, p in enumerate(parts):
            for value in p["windows"][w]:
                metrics.append(rank, value)
        logged = metrics.log()
        if clear:
            metrics.clear()
    return logged


def broken(parts):
    return _run(parts, clear=False)


def right(parts):
    return _run(parts, clear=True)


def single(parts):
    last = [v for p in parts for v in p["windows"][-1]]
    return sum(last) / len(last)


if __name__ == "__main__":
    d = make(0)
    print("broken", broken(**d), "right", right(**d), "single process", single(**d))
    assert abs(right(**d) - single(**d)) < 1e-9 and abs(broken(**d) - right(**d)) > 0.05
