"""One training row per assistant turn when the template drops earlier reasoning (Qwen3 / DeepSeek style thinking models; prime-rl and verifiers branch trajectories the same way). Since the reasoning of old turns is removed from the context, turn k's
prompt is not a prefix of turn k+1's prompt; a conversation with n turns therefore becomes n rows in which the context is repeated. Looks like duplicated data, but each generated token is trained exactly once, in the context in which it was sampled."""
import torch

FAMILY = "agents"
KIND = "data stage"
INPUTS = {"rows": "list of conversations {'turns': [{'user': ids, 'think': ids, 'answer': ids}], 'advantage': number}"}
SETTINGS = {}
NOTES = ("Output rows: input_ids, loss_mask (1 on the reasoning, answer and end token of the last turn of that row only), advantage of the conversation, copied to each row. Ids: 1 user, 2 assistant, 3 think-open, 4 think-close, 5 end of turn. think-open belongs to "
         "the generation prompt and is not trained. More rows out than in; order is kept.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    def ids(lo, hi):
        return torch.randint(10, 50, (int(torch.randint(lo, hi, (1,), generator=g)),), generator=g).tolist()
    return {"rows": [{"turns": [{"user": ids(2, 4), "think": ids(3, 6), "answer": ids(2, 4)} for _ in range(n)], "advantage": float(n) - 2.0} for n in (1, 3, 2)]}


def right(rows):
    out = []
    for row in rows:
        history = []
        for turn in row["turns"]:
            prompt = history + [1] + turn["user"] + [5, 2, 3]
            completion = turn["think"] + [4] + turn["answer"] + [5]
            out.append({"input_ids": prompt + completion, "loss_mask": [0] * len(prompt) + [1] * len(completion), "advantage": row["advantage"]})
            history = history + [1] + turn["user"] + [5, 2] + turn["answer"] + [5]
    return out


if __name__ == "__main__":
    d = make(0)
    out = right(**d)
    generated = sum(len(t["think"]) + 1 + len(t["answer"]) + 1 for r in d["rows"] for t in r["turns"])
    print("conversations", len(d["rows"]), "rows", len(out), "trained tokens", sum(sum(o["loss_mask"]) for o in out), "generated", generated)
    assert len(out) == 6 and sum(sum(o["loss_mask"]) for o in out) == generated
    for o in out:                                       # only one reasoning block is left in each row
        assert o["input_ids"].count(3) == 1 and o["input_ids"].count(4) == 1
