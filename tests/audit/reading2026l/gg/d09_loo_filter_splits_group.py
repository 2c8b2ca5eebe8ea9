"""Dynamic sampling with a leave-one-out baseline splits prompt groups. NVIDIA-NeMo/RL#3469,
https://github.com/NVIDIA-NeMo/RL/pull/3469, 2026. The filter for groups without signal looks at a standard deviation that is
computed per response from its siblings only. If exactly one response of a group differs, that response sees identical siblings,
gets std 0 and is removed: [1, 0, 0, 0] becomes [0, 0, 0], so that the one informative response is never trained."""
import random

FAMILY = "advantages, returns and rewards"
KIND = "data stage"
INPUTS = {"rows": "generations; each a dict: 'prompt' (number), 'gen' (number inside the prompt), 'reward' (float); all generations of a prompt are present, at least 2"}
SETTINGS = {}
NOTES = ("Dynamic sampling (DAPO) before training with a leave-one-out baseline. advantage of a row = its reward minus the mean reward of the other rows of the same prompt. "
         "A prompt whose rewards are all equal has no signal and is dropped with all its rows; every other prompt goes on with all its rows, none missing. "
         "Output: the kept rows in input order with 'advantage' (float) added; advantages of a kept prompt sum to 0.")


def make(seed):
    rng = random.Random(seed)
    groups = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 0, 1]]
    rng.shuffle(groups)
    rows = [{"prompt": p, "gen": k, "reward": float(r)} for p, rs in enumerate(groups) for k, r in enumerate(rng.sample(rs, 4))]
    return {"rows": rows}


def _siblings(rows, i):
    return [r["reward"] for j, r in enumerate(rows) if j != i and r["prompt"] == rows[i]["prompt"]]


def _advantage(rows, i):
    o = _siblings(rows, i)
    return rows[i]["reward"] - sum(o) / len(o)


def broken(rows):
    out = []
    for i, r in enumerate(rows):
        o = _siblings(rows, i)
        mean = sum(o) / len(o)
        std = (sum((x - mean) ** 2 for x in o) / len(o)) ** 0.5
        if std != 0:
            out.append(dict(r, advantage=_advantage(rows, i)))
    return out


def right(rows):
    out = []
    for i, r in enumerate(rows):
        group = _siblings(rows, i) + [r["reward"]]
        if max(group) != min(group):
            out.append(dict(r, advantage=_advantage(rows, i)))
    return out


if __name__ == "__main__":
    m = make(0)
    for f in (broken, right):
        by = {}
        for r in f(**m):
            by.setdefault(r["prompt"], []).append(r["reward"])
        print(f.__name__, by)
    assert len(broken(**m)) != len(right(**m)) and all(len([r for r in right(**m) if r["prompt"] == p]) in (0, 4) for p in range(6))
