"""One conversation becomes several rows, and the same answer appears with and without its reasoning. Templates of
reasoning models (Qwen3, DeepSeek-R1) strip the reasoning of earlier turns from the history. To train on what the model
sees at inference, each assistant turn becomes a row: history without reasoning, then this turn with its reasoning. Only
the last turn of a row is trained, so each trained token occurs exactly once although the history is repeated."""
import random

FAMILY = "agents"
KIND = "data stage"
INPUTS = {"rows": "list of conversations; a conversation is {turns: list of {user, think, answer}}, each a list of ids"}
SETTINGS = {}
NOTES = ("Rows out: ids and loss_mask; as many rows as assistant turns, in order, more than rows in. Token 1 opens a user "
         "message, 2 an assistant message, 3 ends a message, 4 and 5 enclose reasoning; words are 10 ... 49. Think, answer "
         "and end token of the last turn are trained.")


def make(seed):
    rng = random.Random(seed)
    w = lambda lo, hi: [rng.randint(10, 49) for _ in range(rng.randint(lo, hi))]
    return {"rows": [{"turns": [{"user": w(2, 4), "think": w(3, 6), "answer": w(1, 3)} for _ in range(rng.randint(1, 3))]}
                     for _ in range(4)]}


def right(rows):
    out = []
    for row in rows:
        history = []
        for turn in row["turns"]:
            prompt = history + [1] + turn["user"] + [3, 2]
            target = [4] + turn["think"] + [5] + turn["answer"] + [3]
            out.append({"ids": prompt + target, "loss_mask": [0] * len(prompt) + [1] * len(target)})
            history = prompt + turn["answer"] + [3]
    return out


if __name__ == "__main__":
    c = make(0)
    out = right(**c)
    turns = [t for r in c["rows"] for t in r["turns"]]
    assert len(out) == len(turns)
    for o, t in zip(out, turns):
        assert [i for i, m in zip(o["ids"], o["loss_mask"]) if m] == [4] + t["think"] + [5] + t["answer"] + [3]
        assert o["ids"].count(4) == 1 and 4 not in [i for i, m in zip(o["ids"], o["loss_mask"]) if not m]
    print(len(c["rows"]), "conversations ->", len(out), "rows; trained tokens", sum(sum(o["loss_mask"]) for o in out),
          "= tokens of all turns", sum(len(t["think"]) + len(t["answer"]) + 3 for t in turns))
