"""Assistant messages of the prompt history are trained as if they were generated. NVIDIA-NeMo/RL#2176, https://github.com/NVIDIA-NeMo/RL/pull/2176 (closes #1956, #1960), 2026.
The GRPO token mask was set to one for every message whose role is "assistant". In multi-turn data the prompt itself may hold
assistant turns from a recorded conversation; they were not sampled by the policy and have no sampling log-probability (zeros were
filled in), yet they entered the policy loss. The fix trains only assistant messages that carry generation_logprobs."""
import torch

FAMILY = "agents"
KIND = "data stage"
INPUTS = {"rows": "list of rows; each row has 'message_log': list of messages {'role', 'token_ids', optional 'generation_logprobs' (only on "
                  "messages that the policy sampled in this rollout)}; the prompt may contain earlier assistant turns; plus 'reward'"}
SETTINGS = {}
NOTES = ("One output row per input row with input_ids, token_mask (1 = enters the policy loss), generation_logprobs (0 where not sampled) and reward. "
         "Tokens of user, system, environment and of recorded history are context only. No exact number of rows needed.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    def ids(n):
        return torch.randint(3, 50, (n,), generator=g).tolist()
    rows = []
    for i in range(4):
        log = [{"role": "system", "token_ids": ids(3)}, {"role": "user", "token_ids": ids(4)}]
        if i % 2 == 0:                       # recorded history in the prompt
            log += [{"role": "assistant", "token_ids": ids(5)}, {"role": "user", "token_ids": ids(3)}]
        for turn in range(1 + i % 3):
            a = ids(4 + turn)
            log.append({"role": "assistant", "token_ids": a,
                        "generation_logprobs": (-torch.rand(len(a), generator=g)).tolist()})
            log.append({"role": "environment", "token_ids": ids(3)})
        rows.append({"message_log": log, "reward": float(i % 2)})
    return {"rows": rows}


def broken(rows):
    out = []
    for row in rows:
        input_ids, mask, logprobs = [], [], []
        for message in row["message_log"]:
            n = len(message["token_ids"])
            input_ids += message["token_ids"]
            mask += [1 if message["role"] == "assistant" else 0] * n
            logprobs += message.get("generation_logprobs", [0.0] * n)
        out.append({"input_ids": input_ids, "token_mask": mask, "generation_logprobs": logprobs, "reward": row["reward"]})
    return out


def right(rows):
    out = []
    for row in rows:
        input_ids, mask, logprobs = [], [], []
        for message in row["message_log"]:
            n = len(message["token_ids"])
            generated = message["role"] == "assistant" and "generation_logprobs" in message
            input_ids += message["token_ids"]
            mask += [1 if generated else 0] * n
            logprobs += message.get("generation_logprobs", [0.0] * n)
        out.append({"input_ids": input_ids, "token_mask": mask, "generation_logprobs": logprobs, "reward": row["reward"]})
    return out


if __name__ == "__main__":
    b, r = broken(**make(0)), right(**make(0))
    print("trained tokens per row, broken", [sum(x["token_mask"]) for x in b], "right", [sum(x["token_mask"]) for x in r])
    assert [x["token_mask"] for x in b] != [x["token_mask"] for x in r]
    for x in r:
        assert all((lp != 0) == (m == 1) for lp, m in zip(x["generation_logprobs"], x["token_mask"]))
