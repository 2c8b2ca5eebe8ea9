"""REINFORCE++ resets the running return at every observation token. verl-project/verl#7278 (PR #7280),
https://github.com/verl-project/verl/issues/7278, 2026.
response_mask is 0 both on trailing padding and on tool observations inside the response. The backward scan multiplied the running
return by the mask to reset after the end, so the outcome reward reached only the last assistant turn; earlier turns got a return of 0."""
import torch

FAMILY = "agents"
KIND = "advantages"
INPUTS = {
    "rewards": "token-level reward: outcome on the last policy token, else 0, [rows, time]",
    "response_mask": "1 on tokens of the policy, 0 on tool observations and on padding, [rows, time]",
}
SETTINGS = {"gamma": "discount for each policy token, 1.0"}
NOTES = ("REINFORCE++ outcome advantage: discounted reward-to-go along the policy's tokens, whitened over all policy tokens of the batch. "
         "Observations take no part: they neither carry reward nor decay the return. No groups. Constants, no gradient.")


def _whiten(x, mask):
    n = mask.sum()
    mean = (x * mask).sum() / n
    var = ((x - mean) ** 2 * mask).sum() / (n - 1)
    return (x - mean) * torch.rsqrt(var + 1e-8) * mask


def broken(rewards, response_mask, gamma=1.0):
    returns = torch.zeros_like(rewards)
    running = torch.zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        running = rewards[:, t] + gamma * running
        returns[:, t] = running
        running = running * response_mask[:, t]
    return _whiten(returns, response_mask)


def right(rewards, response_mask, gamma=1.0):
    returns = torch.zeros_like(rewards)
    running = torch.zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        on = response_mask[:, t] > 0
        running = torch.where(on, rewards[:, t] + gamma * running, running)
        returns[:, t] = running
    return _whiten(returns, response_mask)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    B, T = 5, 20
    mask, rew = torch.zeros(B, T), torch.zeros(B, T)
    for b in range(B):
        t, turns = 0, int(torch.randint(1, 4, (1,), generator=g))
        for k in range(turns):
            n = int(torch.randint(2, 5, (1,), generator=g))
            mask[b, t:t + n] = 1
            t += n
            if k < turns - 1:
                t += int(torch.randint(1, 3, (1,), generator=g))
        rew[b, t - 1] = float(torch.rand(1, generator=g) < 0.5) + 0.1 * float(torch.rand(1, generator=g))
    return {"rewards": rew, "response_mask": mask}


if __name__ == "__main__":
    x = make(0)
    a, b = broken(**x), right(**x)
    print("broken row 0", [round(v, 2) for v in a[0].tolist()])
    print("right  row 0", [round(v, 2) for v in b[0].tolist()])
    print("max difference", float((a - b).abs().max()))
    assert not torch.allclose(a, b)
