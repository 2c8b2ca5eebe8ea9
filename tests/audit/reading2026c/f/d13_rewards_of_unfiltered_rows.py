"""Dynamic sampling puts the rewards of all rows on the rows it kept. NVIDIA-NeMo/RL#3794, https://github.com/NVIDIA-NeMo/RL/pull/3794, 2026.
After dropping groups without reward spread, the code overwrites the filtered batch's total_reward with the unfiltered tensor to log it. Later slicing and joining treat it as
aligned, so rows carry the rewards of other rows whenever a group was dropped."""
import random

FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "rollouts {prompt: group number, completion: text, reward: 0 or 1}, groups of 4 in order"}
SETTINGS = {"size": "rows wanted for the update, 8"}
NOTES = ("Keeps the groups whose rewards are not all equal, in order, and cuts to `size` rows. Each row gets baseline (group mean), total_reward (its own reward, used for the advantage and "
         "the log) and filtered_reward. The rows come in whole groups of 4.")
GROUP = 4

def make(seed):
    r = random.Random(seed)
    rows = []
    for g in range(6):
        p = (0.0, 0.5, 1.0)[g % 3]
        rewards = [float(r.random() < p) for _ in range(GROUP)]
        if p == 0.5:
            rewards[0], rewards[1] = 1.0, 0.0
        rows += [{"prompt": g, "completion": f"{g}-{i}", "reward": x} for i, x in enumerate(rewards)]
    return {"rows": rows}

def columns_of(rows):
    columns = {"prompt": [r["prompt"] for r in rows], "completion": [r["completion"] for r in rows], "total_reward": [r["reward"] for r in rows]}
    columns["baseline"], keep = [], []
    for start in range(0, len(rows), GROUP):
        group = columns["total_reward"][start:start + GROUP]
        columns["baseline"] += [sum(group) / GROUP] * GROUP
        if max(group) > min(group):
            keep += range(start, start + GROUP)
    return columns, keep

def rows_of(columns, size):
    columns = {k: v[:size] for k, v in columns.items()}
    return [{k: v[i] for k, v in columns.items()} for i in range(min(len(v) for v in columns.values()))]

def broken(rows, size=8):
    columns, keep = columns_of(rows)
    total_rewards = columns["total_reward"]
    filtered = {k: [v[i] for i in keep] for k, v in columns.items()}
    # store filtered and total rewards to track them separately
    filtered["filtered_reward"] = filtered["total_reward"]
    filtered["total_reward"] = total_rewards
    return rows_of(filtered, size)

def right(rows, size=8):
    columns, keep = columns_of(rows)
    filtered = {k: [v[i] for i in keep] for k, v in columns.items()}
    filtered["filtered_reward"] = list(filtered["total_reward"])
    return rows_of(filtered, size)

if __name__ == "__main__":
    made = make(0)
    own = {r["completion"]: r["reward"] for r in made["rows"]}
    a, b = broken(**made), right(**made)
    wrong = sum(r["total_reward"] != own[r["completion"]] for r in a)
    print("rows with another row's reward: broken", wrong, "of", len(a), "right", sum(r["total_reward"] != own[r["completion"]] for r in b))
    assert wrong > 0 and all(r["total_reward"] == own[r["completion"]] for r in b) and len(a) == len(b) == 8
