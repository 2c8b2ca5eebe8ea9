"""Merged multi-turn response cut at the cap of one turn. rllm-org/rllm#575, https://github.com/rllm-org/rllm/pull/575, 2026.
The collator that merges the turns of a trajectory into one row padded and cut the response at data.max_response_length,
which is the generation cap of a single turn. A merged response [A0, obs1, A1, obs2, A2 ...] may be much longer.
The later turns, their mask entries and log-probabilities were cut off without a warning, so only early turns were trained."""
import random
import torch

FAMILY = "agents"
KIND = "collator"
INPUTS = {"rows": "trajectories; each has prompt_ids, steps (a list of dicts with action_ids, action_logprobs, observation_ids) and reward"}
SETTINGS = {"max_response_length": "generation cap of one turn, 6 tokens", "max_total_length": "cap of prompt and merged response together, 48 tokens", "pad": "padding id, 0"}
NOTES = ("One row per trajectory: prompt, then actions and observations in order. response_mask is 1 on action tokens only, old_logprobs is 0 on "
         "observations and padding. No turn of a trajectory that fits in max_total_length is lost.")


def make(seed):
    r = random.Random(seed)
    rows = []
    for _ in range(4):
        steps = []
        for _ in range(r.randrange(1, 4)):
            n = r.randrange(2, 7)
            steps.append({"action_ids": [r.randrange(1, 40) for _ in range(n)], "action_logprobs": [-2 * r.random() for _ in range(n)],
                          "observation_ids": [r.randrange(1, 40) for _ in range(r.randrange(1, 4))]})
        rows.append({"prompt_ids": [r.randrange(1, 40) for _ in range(r.randrange(2, 6))], "steps": steps, "reward": r.random()})
    return {"rows": rows}


def merge(row):
    ids, mask, lps = [], [], []
    for step in row["steps"]:
        ids += step["action_ids"] + step["observation_ids"]
        mask += [1] * len(step["action_ids"]) + [0] * len(step["observation_ids"])
        lps += step["action_logprobs"] + [0.0] * len(step["observation_ids"])
    return ids, mask, lps


def pad_batch(seqs, length, value):
    return torch.tensor([(s + [value] * length)[:length] for s in seqs])


def collate(rows, bound, pad):
    merged = [merge(row) for row in rows]
    width = min(max(len(m[0]) for m in merged), bound)
    prompt_width = max(len(row["prompt_ids"]) for row in rows)
    prompts = torch.tensor([[pad] * (prompt_width - len(row["prompt_ids"])) + row["prompt_ids"] for row in rows])
    return {"prompts": prompts, "responses": pad_batch([m[0] for m in merged], width, pad), "response_mask": pad_batch([m[1] for m in merged], width, 0),
            "old_logprobs": pad_batch([m[2] for m in merged], width, 0.0), "rewards": torch.tensor([row["reward"] for row in rows])}


def broken(rows, max_response_length=6, max_total_length=48, pad=0):
    return collate(rows, max_response_length, pad)


def right(rows, max_response_length=6, max_total_length=48, pad=0):
    return collate(rows, max_total_length - max(len(row["prompt_ids"]) for row in rows), pad)


if __name__ == "__main__":
    rows = make(0)["rows"]
    b, g = broken(rows), right(rows)
    want = sum(len(s["action_ids"]) for row in rows for s in row["steps"])
    print("action tokens in the rows", want, "broken keeps", int(b["response_mask"].sum()), "right keeps", int(g["response_mask"].sum()))
    assert int(g["response_mask"].sum()) == want != int(b["response_mask"].sum())
