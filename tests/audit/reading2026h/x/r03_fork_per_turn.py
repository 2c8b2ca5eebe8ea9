"""One episode becomes one row per turn, since the template drops earlier thinking (Qwen3, DeepSeek-R1; message-level rollouts of TRL, fork in AReaL and rLLM).
The model saw another context in each turn: earlier thoughts are removed from the history. Each turn is thus its own row; prompts overlap and earlier answers
come again, without their thoughts, as untrained context. Each row has the weight 1/turns of its episode, so that an episode counts once."""
FAMILY = "agents"
KIND = "data stage"
INPUTS = {"rows": "list of episodes: id, system (ids), turns (list of dicts: user ids, think ids, answer ids), advantage (float)"}
SETTINGS = {}
NOTES = ("Ids: 1 opens thinking, 2 closes it, 3 ends a message. Rows out: ids, mask (1 on thought and answer of the last turn and its end mark), advantage, weight (sums to 1 over the rows of an episode), "
         "episode. There are more rows out than in; equal prefixes are meant. The answers of earlier turns are context with mask 0, their thoughts are gone.")
import torch

OPEN, CLOSE, END = 1, 2, 3


def make(seed):
    g = torch.Generator().manual_seed(seed)
    c = lambda n: torch.randint(10, 48, (n,), generator=g).tolist()
    rows = []
    for e in range(3):
        rows.append({"id": e, "system": c(3), "turns": [{"user": c(3), "think": c(4), "answer": c(2)} for _ in range(e + 1)], "advantage": float(torch.randn((), generator=g))})
    return {"rows": rows}


def right(rows):
    out = []
    for row in rows:
        history = row["system"] + [END]
        for turn in row["turns"]:
            prompt = history + turn["user"] + [END]
            sampled = [OPEN] + turn["think"] + [CLOSE] + turn["answer"] + [END]
            out.append({"ids": prompt + sampled, "mask": [0] * len(prompt) + [1] * len(sampled), "advantage": row["advantage"],
                        "weight": 1.0 / len(row["turns"]), "episode": row["id"]})
            history = prompt + turn["answer"] + [END]
    return out


if __name__ == "__main__":
    rows = make(0)["rows"]
    out = right(rows)
    print(len(rows), "episodes ->", len(out), "rows")
    assert len(out) == 6
    for e in range(3):
        mine = [o for o in out if o["episode"] == e]
        assert abs(sum(o["weight"] for o in mine) - 1) < 1e-9
        for k, o in enumerate(mine):
            assert o["ids"].count(OPEN) == 1                      # only the thought of this turn
            assert [t for t, m in zip(o["ids"], o["mask"]) if m] == [OPEN] + rows[e]["turns"][k]["think"] + [CLOSE] + rows[e]["turns"][k]["answer"] + [END]
