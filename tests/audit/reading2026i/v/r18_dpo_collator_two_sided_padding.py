"""Preference collator: prompts padded left, completions right, both halves in one batch. As in TRL's DPO: rows [0, n) are the
chosen ones and [n, 2n) the rejected ones of the same pairs, so that one forward serves both. The prompt is padded on
the left and the completion on the right; the padding thus lies at both ends and the text is contiguous in the middle."""
import random
import torch

FAMILY = "data stages"
KIND = "collator"
INPUTS = {"rows": "list of {'prompt', 'chosen', 'rejected'}: lists of token ids"}
SETTINGS = {"max_prompt": "prompt tokens kept, from the end, 6", "pad_id": "padding id, 0"}
NOTES = ("2n rows for n pairs: row i is chosen and row i + n rejected of pair i. Too long prompts lose their beginning. "
         "attention_mask has zeros at both ends; completion_mask is 1 on the completion's tokens. Position ids count real "
         "tokens only and are 0 on the left padding.")


def make(seed):
    r = random.Random(seed)
    ids = lambda a, b: [r.randrange(1, 50) for _ in range(r.randrange(a, b))]
    return {"rows": [{"prompt": ids(2, 10), "chosen": ids(2, 7), "rejected": ids(2, 7)} for _ in range(3)], "max_prompt": 6, "pad_id": 0}


def right(rows, max_prompt=6, pad_id=0):
    prompts = [row["prompt"][-max_prompt:] for row in rows] * 2
    answers = [row["chosen"] for row in rows] + [row["rejected"] for row in rows]
    left, width = max(map(len, prompts)), max(map(len, answers))
    ids = torch.full((len(answers), left + width), pad_id)
    attention, completion = torch.zeros_like(ids), torch.zeros_like(ids)
    for i, (p, a) in enumerate(zip(prompts, answers)):
        ids[i, left - len(p):left] = torch.tensor(p)
        ids[i, left:left + len(a)] = torch.tensor(a)
        attention[i, left - len(p):left + len(a)] = 1
        completion[i, left:left + len(a)] = 1
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": attention, "completion_mask": completion, "position_ids": positions}


if __name__ == "__main__":
    d = make(0)
    o = right(**d)
    print(o["input_ids"], o["position_ids"], sep="\n")
    n = len(d["rows"])
    for i, row in enumerate(d["rows"]):
        for k, name in ((i, "chosen"), (i + n, "rejected")):
            assert o["input_ids"][k][o["attention_mask"][k] == 1].tolist() == row["prompt"][-6:] + row[name]
            assert o["input_ids"][k][o["completion_mask"][k] == 1].tolist() == row[name]
            assert o["position_ids"][k][o["attention_mask"][k] == 1].tolist() == list(range(int(o["attention_mask"][k].sum())))
