"""pass@1 is measured over episodes that produced a step only. rllm-org/rllm#382 (fix #442), https://github.com/rllm-org/rllm/issues/382, 2026.
A workflow episode that ends before its first step (for example prompt too long) gives no row to train on, and is dropped when the rows are built.
The validation metric was computed from the rows that were left, so an episode that failed that way left the denominator and pass@1 went up."""
import random

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"per_rank": "list over ranks; each a list of episodes {task_id, num_steps, correct, termination}"}
SETTINGS = {}
NOTES = "pass@1 = share of correct episodes among all episodes that were started, over all ranks. An episode without a step counts as wrong. Ranks may hold different numbers of episodes. `single` is the one-process twin."


def make(seed):
    rng = random.Random(seed)
    per_rank = []
    for rank in range(3):
        eps = []
        for i in range(rng.randint(6, 9)):
            too_long = rng.random() < 0.25
            eps.append({"task_id": f"{rank}-{i}", "num_steps": 0 if too_long else rng.randint(1, 5),
                        "correct": False if too_long else rng.random() < 0.5,
                        "termination": "max_prompt_length_exceeded" if too_long else "env_done"})
        per_rank.append(eps)
    return {"per_rank": per_rank}


def single(episodes):
    return sum(e["correct"] for e in episodes) / len(episodes)


def _rows(episodes):
    """One row per step, as the trainer sees the episodes."""
    return [{"episode": e["task_id"], "correct": e["correct"]} for e in episodes for _ in range(e["num_steps"])]


def broken(per_rank):
    solved = total = 0
    for episodes in per_rank:
        by_episode = {row["episode"]: row["correct"] for row in _rows(episodes)}
        solved += sum(by_episode.values())
        total += len(by_episode)
    return solved / total


def right(per_rank):
    solved = total = 0
    for episodes in per_rank:
        by_episode = {e["task_id"]: False for e in episodes}
        by_episode.update({row["episode"]: row["correct"] for row in _rows(episodes)})
        solved += sum(by_episode.values())
        total += len(by_episode)
    return solved / total


if __name__ == "__main__":
    d = make(0)
    s = single([e for r in d["per_rank"] for e in r])
    print("broken", broken(**d), "right", right(**d), "single", s)
    assert abs(right(**d) - s) < 1e-12 and broken(**d) > right(**d) + 0.01
