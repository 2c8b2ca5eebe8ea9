"""Offline agent workflow drops per-interaction rewards. areal-project/AReaL#1661,
https://github.com/areal-project/AReaL/issues/1661, 2026 (fix areal-project/AReaL#1662). An agent may return one reward or a dict
from interaction id to reward. The v2 offline path reduced the dict to its last value and gave that to the latest interaction;
the rewards of the earlier turns were lost."""
import random

FAMILY = "agents (several turns, tools, observation masks)"
KIND = "data stage"
INPUTS = {
    "rows": "episodes; each a dict: 'episode' (number), 'interactions' (list in time order of dicts with 'id', 'prompt_ids', 'completion_ids'), "
            "'result' (what the agent returned: a float, or a dict from interaction id to float, in any order)",
}
SETTINGS = {}
NOTES = ("Turns the episodes into one training row per interaction, in the order of the episodes and of the interactions: dict with 'episode', 'id', 'prompt_ids', 'completion_ids', 'reward'. "
         "A float belongs to the last interaction of the episode; a dict gives each named interaction its own value. Interactions that are not named have reward 0.0. No discounting. No row is dropped.")


def make(seed):
    rng = random.Random(seed)
    rows = []
    for ep in range(4):
        inter = [{"id": f"e{ep}-t{k}", "prompt_ids": [rng.randrange(50) for _ in range(3 + 2 * k)],
                  "completion_ids": [rng.randrange(50) for _ in range(2)]} for k in range(rng.randint(2, 4))]
        if ep == 1:
            result = 1.0
        else:
            keys = [x["id"] for x in inter]
            if ep == 2:
                rng.shuffle(keys)
            result = {k: round(rng.uniform(-1, 1), 2) for k in keys}
        rows.append({"episode": ep, "interactions": inter, "result": result})
    return {"rows": rows}


def _rows(rows, assign):
    out = []
    for ep in rows:
        rewards = assign(ep)
        for x in ep["interactions"]:
            out.append({"episode": ep["episode"], "id": x["id"], "prompt_ids": x["prompt_ids"],
                        "completion_ids": x["completion_ids"], "reward": rewards.get(x["id"], 0.0)})
    return out


def broken(rows):
    def assign(ep):
        r = ep["result"]
        if isinstance(r, dict):
            r = float(next(reversed(r.values())) if r else 0.0)
        return {ep["interactions"][-1]["id"]: float(r)}
    return _rows(rows, assign)


def right(rows):
    def assign(ep):
        r = ep["result"]
        if isinstance(r, dict):
            return {k: float(v) for k, v in r.items()}
        return {ep["interactions"][-1]["id"]: float(r)}
    return _rows(rows, assign)


if __name__ == "__main__":
    m = make(0)
    a, b = broken(**m), right(**m)
    for x, y in zip(a, b):
        print(x["id"], x["reward"], y["reward"])
    assert sum(x["reward"] != y["reward"] for x, y in zip(a, b)) > 3
