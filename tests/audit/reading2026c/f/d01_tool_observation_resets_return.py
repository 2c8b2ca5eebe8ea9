"""REINFORCE++ return is reset at tool observations. verl-project/verl#6376, https://github.com/verl-project/verl/pull/6376, 2026.
The right-to-left scan multiplied the running return by response_mask, which is meant for the padding after EOS. In a multi-turn row
the tool observation inside the response has mask 0 as well, so every model token before a tool call lost the later reward. No error."""
import torch

FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "token-level rewards, [rows, time]; the outcome reward sits on the last model token",
          "groups": "prompt index of each row, [rows]; REINFORCE++ normalizes over the whole batch and does not use it",
          "mask": "1 on tokens the model wrote, 0 on tool observations inside the response and on padding, [rows, time]"}
SETTINGS = {"gamma": "discount per model token, 0.9"}
NOTES = ("REINFORCE++ with a batch-wide whitening of the returns over model tokens. Observation tokens are not actions: they take no "
         "discount step and pass the return through. Result is 0 where mask is 0. Rows of any number.")

def make(seed):
    g = torch.Generator().manual_seed(seed)
    rows, time = 6, 14
    mask = torch.zeros(rows, time)
    rewards = torch.zeros(rows, time)
    for r in range(rows):
        first = int(torch.randint(2, 5, (1,), generator=g))
        obs = int(torch.randint(2, 4, (1,), generator=g))
        last = int(torch.randint(2, 6, (1,), generator=g))
        mask[r, :first] = 1
        mask[r, first + obs:first + obs + last] = 1
        rewards[r, first + obs + last - 1] = torch.randn(1, generator=g)
    return {"rewards": rewards, "groups": torch.arange(rows) // 3, "mask": mask}

def whiten(returns, mask):
    n = mask.sum()
    mean = (returns * mask).sum() / n
    var = ((returns - mean) ** 2 * mask).sum() / n
    return (returns - mean) * (var + 1e-8).rsqrt() * mask

def broken(rewards, groups, mask, gamma=0.9):
    returns, running = torch.zeros_like(rewards), torch.zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        running = rewards[:, t] + gamma * running
        returns[:, t] = running
        running = running * mask[:, t]  # reset after EOS
    return whiten(returns, mask)

def right(rewards, groups, mask, gamma=0.9):
    returns, running = torch.zeros_like(rewards), torch.zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        running = torch.where(mask[:, t] > 0, rewards[:, t] + gamma * running, running)
        returns[:, t] = running
    return whiten(returns, mask)

if __name__ == "__main__":
    made = make(0)
    a, b = broken(**made), right(**made)
    print("largest difference", float((a - b).abs().max()))
    assert float((a - b).abs().max()) > 0.1
    one = dict(rewards=torch.tensor([[0., 0., 1.]]), mask=torch.tensor([[1., 0., 1.]]))
    run, out = torch.zeros(1), []
    for t in (2, 1, 0):
        run = torch.where(one["mask"][:, t] > 0, one["rewards"][:, t] + 0.5 * run, run)
        out.insert(0, float(run))
    print("the issue's example, fixed returns", out)
    assert out == [0.5, 1.0, 1.0]
