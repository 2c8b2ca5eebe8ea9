"""GAE for several turns that jumps over observation tokens, as in verl (core_algos.compute_gae_advantage_return) and in turn-based PPO for tool agents.
Tokens of tool results between two turns are not actions: the recursion carries the next value and the running sum through them unchanged, so that the last token of a
turn bootstraps from the first token of the next turn, with one discount and not one per observation token. The advantage at an observation token is whatever is carried
(verl leaves it there, the loss masks it); here it is set to 0."""
FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "reward per token, [rows, time], 0 outside of the model's own tokens; usually one at the last token of a turn",
          "values": "value of the critic per token, [rows, time]; at observation tokens it is meaningless and must not be used",
          "action_mask": "1 on tokens that the model sampled, 0 on observations of the environment and on right padding, [rows, time]"}
SETTINGS = {"gamma": "discount per action token, 0.99", "lam": "lambda of GAE, 0.9"}
NOTES = ("Returns advantages [rows, time]. They are the GAE of the sequence that is left when all tokens with action_mask 0 are taken out, written back to their places, 0 elsewhere; "
         "the value behind the last action is 0. Rows are independent; no whitening, no groups. Rewards and values at masked tokens have no influence.")
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    B, T = 4, 14
    mask = torch.zeros(B, T)
    for b in range(B):
        t = 0
        while t < T - 2:
            n = int(torch.randint(1, 4, (1,), generator=g))
            mask[b, t:t + n] = 1
            t += n + int(torch.randint(1, 4, (1,), generator=g))
    rewards = torch.randn(B, T, generator=g) * mask * (torch.rand(B, T, generator=g) < 0.4)
    return {"rewards": rewards, "values": torch.randn(B, T, generator=g), "action_mask": mask}


def right(rewards, values, action_mask, gamma=0.99, lam=0.9):
    T = rewards.shape[1]
    nextvalue = torch.zeros_like(rewards[:, 0])
    running = torch.zeros_like(rewards[:, 0])
    out = []
    for t in reversed(range(T)):
        m = action_mask[:, t]
        delta = rewards[:, t] + gamma * nextvalue - values[:, t]
        new = delta + gamma * lam * running
        nextvalue = values[:, t] * m + (1 - m) * nextvalue
        running = new * m + (1 - m) * running
        out.append(running * m)
    return torch.stack(out[::-1], 1)


if __name__ == "__main__":
    x = make(0)
    a = right(**x)
    slow = torch.zeros_like(a)
    for b in range(a.shape[0]):
        pos = [t for t in range(a.shape[1]) if x["action_mask"][b, t]]
        adv = 0.0
        for k in reversed(range(len(pos))):
            nv = float(x["values"][b, pos[k + 1]]) if k + 1 < len(pos) else 0.0
            adv = float(x["rewards"][b, pos[k]]) + 0.99 * nv - float(x["values"][b, pos[k]]) + 0.99 * 0.9 * adv
            slow[b, pos[k]] = adv
    print(a[0]); print("against the loop", float((a - slow).abs().max()))
    assert torch.allclose(a, slow, atol=1e-5)
