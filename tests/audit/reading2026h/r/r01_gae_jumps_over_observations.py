"""GAE that jumps over tool observations. As in verl (compute_gae_advantage_return since verl-project/verl#2337, 2025).
Neither the value nor the TD error of an observation token enters: the recursion carries next value and running sum over
the gap to the next token that the policy wrote. The masked positions receive a copy of the running sum, which is not
zero and is ignored later by the loss mask."""
import torch

FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "token-level rewards, [rows, time], only on generated tokens", "values": "critic values, [rows, "
          "time], arbitrary on observation tokens", "response_mask": "1 = written by the policy, 0 = tool output or "
          "padding at the end, [rows, time]"}
SETTINGS = {"gamma": "discount, 0.95", "lam": "GAE lambda, 0.9"}
NOTES = ("Returns the advantages; only entries with response_mask 1 have a meaning. Time runs over generated tokens only, "
         "so gamma and lambda are not applied inside a gap. No whitening. No gradient.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    mask = torch.zeros(4, 18)
    rewards = torch.zeros(4, 18)
    for i in range(4):
        t = 0
        for _ in range(3):
            n = int(torch.randint(2, 4, (1,), generator=g))
            mask[i, t:t + n] = 1
            last = t + n - 1
            t += n + int(torch.randint(1, 4, (1,), generator=g))
        rewards[i, last] = float(torch.randint(0, 2, (1,), generator=g))
    return {"rewards": rewards, "values": torch.randn(4, 18, generator=g), "response_mask": mask}


def right(rewards, values, response_mask, gamma=0.95, lam=0.9):
    next_value, running, out = 0.0, 0.0, []
    for t in reversed(range(rewards.shape[1])):
        m = response_mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        new = delta + gamma * lam * running
        next_value = values[:, t] * m + (1 - m) * next_value
        running = new * m + (1 - m) * running
        out.append(running)
    return torch.stack(out[::-1], 1)


if __name__ == "__main__":
    c = make(0)
    a = right(**c)
    worst = 0.0
    for i in range(4):
        idx = c["response_mask"][i].nonzero()[:, 0].tolist()
        run = 0.0
        for j in reversed(range(len(idx))):
            nxt = c["values"][i, idx[j + 1]] if j + 1 < len(idx) else 0.0
            run = c["rewards"][i, idx[j]] + 0.95 * nxt - c["values"][i, idx[j]] + 0.95 * 0.9 * run
            worst = max(worst, abs(float(run - a[i, idx[j]])))
    print("largest difference to GAE on the rows without observations", worst)
    assert worst < 1e-5
