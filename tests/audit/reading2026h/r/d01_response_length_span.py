"""Overlong penalty measures the span of the response, tool tokens included. OpenRLHF/OpenRLHF#1255 (fixes #1243),
https://github.com/OpenRLHF/OpenRLHF/pull/1255, 2026.
The response length was last action index minus first action index plus one. In a multi-turn agent rollout the action
mask has gaps where the tool output sits, so the length counted tokens that the model did not write, and the overlong
penalty lowered the reward of trajectories that were not overlong."""
import torch

FAMILY = "agents"
KIND = "data stage"
INPUTS = {"rows": "list of trajectories: ids (list of tokens), action_mask (1 where the policy wrote the token, 0 for "
                  "prompt and tool output), reward (float)"}
SETTINGS = {"max_new_tokens": "budget of generated tokens, 24", "buffer": "length of the soft overlong zone, 8",
            "factor": "largest penalty, 1.0"}
NOTES = ("Adds response_length (number of generated tokens) and lowers reward by the DAPO soft overlong penalty. One "
         "row in, one row out, order kept, ids and action_mask unchanged. Tool output does not count as generated.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    r = lambda lo, hi: int(torch.randint(lo, hi, (1,), generator=g))
    rows = []
    for _ in range(8):
        mask = [0] * r(3, 7)
        for turn in range(r(1, 4)):
            if turn:
                mask += [0] * r(4, 12)
            mask += [1] * r(3, 9)
        ids = torch.randint(1, 50, (len(mask),), generator=g).tolist()
        rows.append({"ids": ids, "action_mask": mask, "reward": float(r(0, 2))})
    return {"rows": rows}


def _penalise(reward, length, max_new_tokens, buffer, factor):
    exceed = length - (max_new_tokens - buffer)
    if exceed > 0:
        reward = reward - min(exceed, buffer) / buffer * factor
    return reward


def broken(rows, max_new_tokens=24, buffer=8, factor=1.0):
    out = []
    for row in rows:
        ones = torch.where(torch.tensor(row["action_mask"]) == 1)[0]
        length = (ones[-1] - ones[0] + 1).item() if len(ones) else 0
        out.append({**row, "response_length": length,
                    "reward": _penalise(row["reward"], length, max_new_tokens, buffer, factor)})
    return out


def right(rows, max_new_tokens=24, buffer=8, factor=1.0):
    out = []
    for row in rows:
        length = int(torch.tensor(row["action_mask"]).sum())
        out.append({**row, "response_length": length,
                    "reward": _penalise(row["reward"], length, max_new_tokens, buffer, factor)})
    return out


if __name__ == "__main__":
    b, r = broken(**make(0)), right(**make(0))
    print("lengths", [x["response_length"] for x in b], [x["response_length"] for x in r])
    print("rewards", [round(x["reward"], 3) for x in b], [round(x["reward"], 3) for x in r])
    assert [x["reward"] for x in b] != [x["reward"] for x in r]
