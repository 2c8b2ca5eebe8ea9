"""Multi-turn agent executor drops the truncation flag. OpenRLHF/OpenRLHF#1327, https://github.com/OpenRLHF/OpenRLHF/pull/1327, 2026.
The multi-turn executor did not carry the engine's finish_reason="length" in its response, the single-turn executor did.
The conversion to samples then took every agent rollout as not truncated. Truncation metrics were too low and the
penalty for answers that do not stop properly was never applied to agent rollouts."""
import random

FAMILY = "agents"
KIND = "data stage"
INPUTS = {"rows": "agent rollouts; each has prompt_ids, turns (a list of dicts with action_ids, finish_reason 'stop' or 'length', observation_ids) and the reward of the environment"}
SETTINGS = {"stop_penalty": "factor on the reward of a rollout whose last generation was cut by the length limit, 0.5"}
NOTES = ("Turns rollouts into training samples: ids, action mask (1 on tokens that the model wrote), reward, truncated. A rollout is truncated when its "
         "last generation ended by length. A truncated rollout's reward is multiplied by stop_penalty, all others keep theirs.")


def make(seed):
    r = random.Random(seed)
    rows = []
    for _ in range(6):
        turns = [{"action_ids": [r.randrange(3, 40) for _ in range(r.randrange(2, 5))], "finish_reason": "stop",
                  "observation_ids": [r.randrange(3, 40) for _ in range(r.randrange(1, 4))]} for _ in range(r.randrange(1, 4))]
        turns[-1]["observation_ids"] = []
        turns[-1]["finish_reason"] = r.choice(["stop", "length"])
        rows.append({"prompt_ids": [r.randrange(3, 40) for _ in range(3)], "turns": turns, "reward": r.choice([0.0, 1.0, 1.0])})
    rows[0]["reward"], rows[0]["turns"][-1]["finish_reason"] = 1.0, "length"
    return {"rows": rows}


def to_sample(response, stop_penalty):
    truncated = response.get("truncated", False)
    reward = response["reward"] * stop_penalty if truncated else response["reward"]
    return {"ids": response["ids"], "mask": response["mask"], "reward": reward, "truncated": truncated}


def run_turns(row):
    ids, mask = list(row["prompt_ids"]), [0] * len(row["prompt_ids"])
    for turn in row["turns"]:
        ids += turn["action_ids"] + turn["observation_ids"]
        mask += [1] * len(turn["action_ids"]) + [0] * len(turn["observation_ids"])
        finish = turn["finish_reason"]
    return ids, mask, finish


def broken(rows, stop_penalty=0.5):
    out = []
    for row in rows:
        ids, mask, _ = run_turns(row)
        out.append(to_sample({"ids": ids, "mask": mask, "reward": row["reward"]}, stop_penalty))
    return out


def right(rows, stop_penalty=0.5):
    out = []
    for row in rows:
        ids, mask, finish = run_turns(row)
        out.append(to_sample({"ids": ids, "mask": mask, "reward": row["reward"], "truncated": finish == "length"}, stop_penalty))
    return out


if __name__ == "__main__":
    rows = make(0)["rows"]
    for f in (broken, right):
        print(f.__name__, [(s["reward"], s["truncated"]) for s in f(rows)])
    assert [s["reward"] for s in broken(rows)] != [s["reward"] for s in right(rows)]
