"""M-RoPE positions of the response continue from a maximum per axis. InternLM/xtuner#2097,
https://github.com/InternLM/xtuner/pull/2097, 2026. In RL training of VLMs the response's 3D positions were continued from the
maximum of each axis of the prompt; the model (get_rope_index) continues all three axes from the one maximum over all axes. They
differ when the prompt ends with image tokens, where the time axis stays small while height and width are large: the policy is
trained at other positions than it was sampled at."""
import torch

FAMILY = "multimodal training, multi-token prediction, speculative drafters"
KIND = "collator"
INPUTS = {"rows": "list of dicts: prompt_ids (list), prompt_positions (3 lists: time, height, width position of each prompt token), response_ids (list)"}
SETTINGS = {"pad_id": "padding token, 0"}
NOTES = ("Right padding to the longest row. Output: input_ids [rows, time], attention_mask [rows, time], loss_mask [rows, time] (1 on response tokens), position_ids [3, rows, time]. "
         "Prompt positions are taken as given. Response token j (from 0) has the same position on all three axes: 1 + the largest position of the prompt over all axes + j. Padding has position 0. "
         "Rows do not depend on each other, except for the width of the padding.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rows = []
    specs = [(4, (1, 2, 5), 0, 4), (3, (1, 3, 2), 3, 6), (2, (1, 4, 3), 0, 3), (6, None, 0, 5)]
    for text, grid, tail, n in specs:
        pos = [[i, i, i] for i in range(text)]
        ids = torch.randint(5, 50, (text,), generator=g).tolist()
        if grid:
            t, h, w = grid
            pos += [[text + a, text + b, text + c] for a in range(t) for b in range(h) for c in range(w)]
            ids += [3] * (t * h * w)
        start = max(max(p) for p in pos) + 1
        pos += [[start + i] * 3 for i in range(tail)]
        ids += torch.randint(5, 50, (tail,), generator=g).tolist()
        rows.append({"prompt_ids": ids, "prompt_positions": [list(x) for x in zip(*pos)], "response_ids": torch.randint(5, 50, (n,), generator=g).tolist()})
    return {"rows": rows}


def _collate(rows, pad_id, start_of):
    width = max(len(r["prompt_ids"]) + len(r["response_ids"]) for r in rows)
    ids = torch.full((len(rows), width), pad_id)
    attn, loss = torch.zeros_like(ids), torch.zeros_like(ids)
    pos = torch.zeros(3, len(rows), width, dtype=torch.long)
    for i, r in enumerate(rows):
        p, q = len(r["prompt_ids"]), len(r["response_ids"])
        prompt_pos = torch.tensor(r["prompt_positions"])
        ids[i, :p + q] = torch.tensor(r["prompt_ids"] + r["response_ids"])
        attn[i, :p + q] = 1
        loss[i, p:p + q] = 1
        pos[:, i, :p] = prompt_pos
        pos[:, i, p:p + q] = start_of(prompt_pos) + torch.arange(1, q + 1)
    return {"input_ids": ids, "attention_mask": attn, "loss_mask": loss, "position_ids": pos}


def broken(rows, pad_id=0):
    return _collate(rows, pad_id, lambda pos: pos.amax(dim=1, keepdim=True))


def right(rows, pad_id=0):
    return _collate(rows, pad_id, lambda pos: pos.amax())


if __name__ == "__main__":
    rows = make(0)["rows"]
    a, b = broken(rows), right(rows)
    for i, r in enumerate(rows):
        p, q = len(r["prompt_ids"]), len(r["response_ids"])
        print("row", i, "response starts at", a["position_ids"][:, i, p].tolist(), b["position_ids"][:, i, p].tolist())
    assert not torch.equal(a["position_ids"], b["position_ids"]) and torch.equal(a["position_ids"][:, 3], b["position_ids"][:, 3])
