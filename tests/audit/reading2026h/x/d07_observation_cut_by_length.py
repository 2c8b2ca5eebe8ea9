"""Observation cut out of the re-rendered chat by length. jingyaogong/minimind#850, https://github.com/jingyaogong/minimind/issues/850, 2026.
The agent rollout keeps sampled special tokens (all but PAD and EOS) in response_ids but decodes with skip_special_tokens, renders the messages
again and takes observe_ids[len(prompt) + len(response):] as the observation. When a sampled special token vanished from the text, the
rendering is shorter than the sampled ids and the cut drops the first observation tokens: the trained sequence is not the one the model saw."""
FAMILY = "agents"
KIND = "data stage"
INPUTS = {"rows": "list of episodes: prompt (content ids), turns (list of dicts: sampled ids, logprobs, tool = content ids of the tool answer or None)"}
SETTINGS = {}
NOTES = ("Ids below 8 are special: 0 PAD, 1 BOS, 2 EOS, 3 user, 4 assistant, 5 tool, 6 think mark. A message is rendered as role, content, EOS; the generation prompt is the "
         "assistant role token. Sampled tokens (without PAD and EOS) have mask 1 and their log-probabilities; all others mask 0 and 0.0. The EOS of an assistant turn "
         "belongs to the observation part. The sampled ids are to be kept as they were sampled; each tool answer must appear complete. One row per episode.")
import torch

PAD, BOS, EOS, USER, ASSISTANT, TOOL, THINK = range(7)


def decode(ids):                       # skip_special_tokens=True
    return [t for t in ids if t >= 8]


def render(messages, generation_prompt):
    ids = [BOS]
    for role, content in messages:
        ids += [role] + content + [EOS]
    return ids + ([ASSISTANT] if generation_prompt else [])


def make(seed):
    g = torch.Generator().manual_seed(seed)
    content = lambda n: torch.randint(8, 48, (n,), generator=g).tolist()
    rows = []
    for e in range(3):
        turns = []
        for k in range(2):
            ids = content(4) + [EOS]
            if e != 1 and k == 0:
                ids.insert(0, THINK)             # a sampled special token
            turns.append({"ids": ids, "logprobs": (-torch.rand(len(ids), generator=g)).tolist(), "tool": content(3) if k == 0 else None})
        rows.append({"prompt": content(4), "turns": turns})
    return {"rows": rows}


def broken(rows):
    out = []
    for row in rows:
        messages = [(USER, row["prompt"])]
        prompt_ids = render(messages, True)
        response, mask, logps = [], [], []
        for turn in row["turns"]:
            pairs = [(t, lp) for t, lp in zip(turn["ids"], turn["logprobs"]) if t != PAD and t != EOS]
            response += [t for t, _ in pairs]
            mask += [1] * len(pairs)
            logps += [lp for _, lp in pairs]
            if turn["tool"] is None:
                break
            messages += [(ASSISTANT, decode(turn["ids"])), (TOOL, turn["tool"])]
            observe = render(messages, True)
            delta = observe[len(prompt_ids) + len(response):]
            response += delta
            mask += [0] * len(delta)
            logps += [0.0] * len(delta)
        out.append({"ids": prompt_ids + response, "mask": [0] * len(prompt_ids) + mask, "logprobs": [0.0] * len(prompt_ids) + logps})
    return out


def right(rows):
    out = []
    for row in rows:
        messages = [(USER, row["prompt"])]
        prompt_ids = render(messages, True)
        response, mask, logps = [], [], []
        for turn in row["turns"]:
            pairs = [(t, lp) for t, lp in zip(turn["ids"], turn["logprobs"]) if t != PAD and t != EOS]
            response += [t for t, _ in pairs]
            mask += [1] * len(pairs)
            logps += [lp for _, lp in pairs]
            if turn["tool"] is None:
                break
            messages += [(ASSISTANT, decode(turn["ids"])), (TOOL, turn["tool"])]
            before = render(messages[:-2], True) + decode(turn["ids"])      # what the rendering has up to the end of the sampled text
            observe = render(messages, True)
            assert observe[: len(before)] == before
            delta = observe[len(before):]
            response += delta
            mask += [0] * len(delta)
            logps += [0.0] * len(delta)
        out.append({"ids": prompt_ids + response, "mask": [0] * len(prompt_ids) + mask, "logprobs": [0.0] * len(prompt_ids) + logps})
    return out


if __name__ == "__main__":
    rows = make(0)["rows"]
    b, r = broken(rows), right(rows)
    for i, row in enumerate(rows):
        want = [EOS, TOOL] + row["turns"][0]["tool"] + [EOS, ASSISTANT]
        has = lambda ids: any(ids[k:k + len(want)] == want for k in range(len(ids)))
        print("episode", i, "same:", b[i] == r[i], "whole observation: broken", has(b[i]["ids"]), "right", has(r[i]["ids"]))
        assert has(r[i]["ids"])
    assert b[1] == r[1] and b[0] != r[0]
