"""The reported reward weighs a rollout by its number of turns. NVIDIA-NeMo/labs-molt#65, https://github.com/NVIDIA-NeMo/labs-molt/pull/65, 2026.
A multi-turn rollout gives one training row per turn, each with the same final reward, and the metric averaged rows. Failing episodes run to the turn limit, so the zeros dominate: 0.28 was
reported where the same policy scored 0.45."""
import random

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "per rank a list of rows {rollout: id of the episode, turn: number, reward: final reward of the episode}; the rows of an episode may lie on several ranks"}
SETTINGS = {}
NOTES = "Mean reward per rollout. All rows of a rollout carry the same reward."

def make(seed):
    r = random.Random(seed)
    rows = []
    for rollout in range(10):
        win = r.random() < 0.5
        rows += [{"rollout": rollout, "turn": t, "reward": float(win)} for t in range(r.randint(1, 3) if win else 8)]
    return {"ranks": [rows[0::3], rows[1::3], rows[2::3]]}

def broken(ranks):
    total = sum(row["reward"] for rows in ranks for row in rows)
    return total / sum(len(rows) for rows in ranks)

def right(ranks):
    reward = {row["rollout"]: row["reward"] for rows in ranks for row in rows}
    return sum(reward.values()) / len(reward)

def twin(ranks):
    """Single process: walk over the episodes in order."""
    rows = sorted((row for rows in ranks for row in rows), key=lambda row: (row["rollout"], row["turn"]))
    first = [row["reward"] for row in rows if row["turn"] == 0]
    return sum(first) / len(first)

if __name__ == "__main__":
    made = make(0)
    print("broken", broken(**made), "right", right(**made), "single process", twin(**made))
    assert right(**made) == twin(**made) and broken(**made) < right(**made) - 0.1
