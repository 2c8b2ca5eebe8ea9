"""Prefix sharing for preference pairs (Wang & Hegde 2024, 'Accelerating Direct Preference Optimization with Prefix Sharing', arXiv 2410.20305). Prompt, chosen and rejected stand in one row with the prompt once; position ids of the rejected answer jump back to the length of the prompt, the mask
is not lower-triangular in blocks, and the first token of both answers is predicted from the same position, so shifted labels cannot express the targets."""
import random

import torch
import torch.nn as nn

FAMILY = "data stages, collators and chat templates"
KIND = "collator"
INPUTS = {"rows": "list of preference pairs, each {'prompt': ids, 'chosen': ids, 'rejected': ids}, ids are non-empty lists of ints from 1"}
SETTINGS = {"pad_id": "id of padding, 0"}
NOTES = (
    "Puts each pair into one row: prompt, chosen, rejected, then padding to the longest row of the batch. Output, all [rows, time] unless stated: input_ids; position_ids (prompt 0..p-1; chosen and rejected both go on from p, because each continues the same prompt; padding 0); branch (0 prompt and padding, 1 chosen, 2 rejected); source_index, for a token "
    "of an answer the column whose logits predict it: the last prompt column for the first token of either answer, otherwise the column before (0 where branch is 0); attention_mask, bool [rows, 1, time, time], True = query may attend to key: causal, a token of an answer sees the prompt and its own answer, never the other one; a padding token sees only itself. "
    "No truncation. With these the log-probabilities of both answers equal those of prompt+chosen and prompt+rejected run alone."
)


def make(seed):
    rng = random.Random(seed)
    some = lambda a, b: [rng.randint(1, 28) for _ in range(rng.randint(a, b))]
    return {"rows": [{"prompt": some(2, 6), "chosen": some(1, 6), "rejected": some(1, 6)} for _ in range(4)]}


def right(rows, pad_id=0):
    time = max(len(r["prompt"]) + len(r["chosen"]) + len(r["rejected"]) for r in rows)
    n = len(rows)
    ids = torch.full((n, time), pad_id, dtype=torch.long)
    pos, branch, source = (torch.zeros(n, time, dtype=torch.long) for _ in range(3))
    see = torch.zeros(n, 1, time, time, dtype=torch.bool)
    causal = torch.ones(time, time).tril().bool()
    for i, r in enumerate(rows):
        p, c, j = len(r["prompt"]), len(r["chosen"]), len(r["rejected"])
        end = p + c + j
        ids[i, :end] = torch.tensor(r["prompt"] + r["chosen"] + r["rejected"])
        pos[i, :end] = torch.tensor(list(range(p + c)) + list(range(p, p + j)))
        branch[i, p:p + c], branch[i, p + c:end] = 1, 2
        source[i, p:end] = torch.arange(p - 1, end - 1)
        source[i, p + c] = p - 1
        real = torch.arange(time) < end
        b = branch[i]
        see[i, 0] = causal & real[:, None] & real & ((b[:, None] == b) | (b == 0))
        see[i, 0] |= torch.diag(~real)
    return {"input_ids": ids, "position_ids": pos, "branch": branch, "source_index": source, "attention_mask": see}


if __name__ == "__main__":
    class Net(nn.Module):
        def __init__(self, vocab=29, width=16):
            super().__init__()
            self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(40, width)
            self.a, self.b = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
            self.head = nn.Linear(width, vocab)

        def forward(self, ids, pos, see):
            x = self.emb(ids) + self.pos(pos)
            for lin in (self.a, self.b):
                q, k, v = lin(x).chunk(3, -1)
                x = x + (q @ k.transpose(1, 2)).masked_fill(~see, float("-inf")).softmax(-1) @ v
            return self.head(x).log_softmax(-1)

    for seed in range(3):
        torch.manual_seed(seed)
        d, net = make(seed), Net()
        out = right(**d)
        lp = net(out["input_ids"], out["position_ids"], out["attention_mask"][:, 0])
        tok = lp.gather(1, out["source_index"][..., None].expand_as(lp)).gather(-1, out["input_ids"][..., None])[..., 0]
        worst = 0.0
        for i, r in enumerate(d["rows"]):
            for b, key in ((1, "chosen"), (2, "rejected")):
                one = torch.tensor(r["prompt"] + r[key])[None]
                t = one.shape[1]
                alone = net(one, torch.arange(t)[None], torch.ones(t, t).tril().bool()[None])[0, :-1].gather(-1, one[0, 1:, None])[len(r["prompt"]) - 1:, 0]
                worst = max(worst, (tok[i][out["branch"][i] == b] - alone).abs().max().item())
        print("seed", seed, "row 0 positions", out["position_ids"][0].tolist(), "difference %.1e" % worst)
        assert worst < 1e-5
