"""The sampled EOS is dropped and added again with logprob 0.0. NovaSky-AI/SkyRL#2148, https://github.com/NovaSky-AI/SkyRL/pull/2148, 2026.
A rollout whose environment turns form one assistant message removes the EOS of every turn, also the last one, then appends an EOS with
rollout logprob 0.0 and an active loss mask. The trainer compares its own logprob of EOS with 0.0, so an unlikely EOS gives a
ratio far below 1 for an unchanged policy and can get the whole trajectory rejected."""
import math
import random

FAMILY = "agents"
KIND = "data stage"
INPUTS = {"rows": "rollouts: {turns: list of {ids, logprobs, observation}, reward}; ids may end in EOS (2); observation is appended after the turn"}
SETTINGS = {}
NOTES = ("Returns training rows {ids, mask, logprobs, rewards}: mask 1 on sampled tokens, logprobs are the sampler's (0.0 where mask is 0), "
         "reward on the last sampled token. EOS inside the message (between turns) is removed on purpose. A row always ends in EOS; one "
         "that was not sampled (length stop) is not trained.")
EOS = 2

def make(seed):
    r = random.Random(seed)
    rows = []
    for i in range(5):
        turns = []
        for t in range(r.randint(1, 3)):
            ids = [r.randint(3, 40) for _ in range(r.randint(2, 5))] + [EOS]
            turns.append({"ids": ids, "logprobs": [math.log(r.uniform(0.2, 0.9)) for _ in ids],
                          "observation": [r.randint(3, 40) for _ in range(2)]})
        turns[-1]["observation"] = []
        turns[-1]["logprobs"][-1] = math.log(r.uniform(0.005, 0.3))
        if i == 4:  # stopped by length: no EOS was sampled
            turns[-1]["ids"].pop()
            turns[-1]["logprobs"].pop()
        rows.append({"turns": turns, "reward": r.random()})
    return {"rows": rows}

def body(row, keep_last_eos):
    ids, mask, logprobs = [], [], []
    for n, turn in enumerate(row["turns"]):
        own, lps = list(turn["ids"]), list(turn["logprobs"])
        last = n == len(row["turns"]) - 1
        if own[-1] == EOS and not (last and keep_last_eos):
            own, lps = own[:-1], lps[:-1]
        ids += own + turn["observation"]
        mask += [1] * len(own) + [0] * len(turn["observation"])
        logprobs += lps + [0.0] * len(turn["observation"])
    return ids, mask, logprobs

def reward_at(mask, reward):
    rewards = [0.0] * len(mask)
    rewards[max(i for i, m in enumerate(mask) if m)] = reward
    return rewards

def broken(rows):
    out = []
    for row in rows:
        ids, mask, logprobs = body(row, keep_last_eos=False)
        ids, mask, logprobs = ids + [EOS], mask + [1], logprobs + [0.0]
        out.append({"ids": ids, "mask": mask, "logprobs": logprobs, "rewards": reward_at(mask, row["reward"])})
    return out

def right(rows):
    out = []
    for row in rows:
        ids, mask, logprobs = body(row, keep_last_eos=True)
        if ids[-1] != EOS:
            ids, mask, logprobs = ids + [EOS], mask + [0], logprobs + [0.0]
        out.append({"ids": ids, "mask": mask, "logprobs": logprobs, "rewards": reward_at(mask, row["reward"])})
    return out

if __name__ == "__main__":
    made = make(0)
    a, b = broken(**made), right(**made)
    for x, y in zip(a, b):
        assert x["ids"] == y["ids"]
        print("EOS logprob broken", x["logprobs"][-1], "right", round(y["logprobs"][-1], 3), "trained", x["mask"][-1], y["mask"][-1])
    assert any(x["logprobs"] != y["logprobs"] for x, y in zip(a, b)) and b[4]["mask"][-1] == 0
