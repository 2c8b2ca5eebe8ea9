"""GAE that jumps over tool output (verl compute_gae_advantage_return, Search-R1). At masked positions the recursion neither discounts nor resets: next value and accumulated advantage are carried unchanged to the last model token before the tool output,
so a token's advantage depends on values many positions later and the factor gamma*lambda is applied once per model token, not per position."""
import torch

FAMILY = "agents (several turns, tools, observation masks)"
KIND = "advantages"
INPUTS = {
    "rewards": "reward of each token, [rows, time]; only entries with action_mask 1 count",
    "values": "critic value of the state in which the token was chosen, [rows, time]; entries outside action_mask are arbitrary",
    "action_mask": "1 for tokens the model generated, 0 for prompt, tool output and padding, [rows, time]",
}
SETTINGS = {"gamma": "discount per generated token, 0.98", "lam": "GAE lambda, 0.9"}
NOTES = (
    "GAE for multi-turn rollouts: the chain of decisions of a row consists of its generated tokens only, as if prompt, tool output and padding were cut out. The state after a generated token is the state of the next generated token of the row, also across tool output in between; after the last generated token the value is 0 "
    "(the rollout is over). delta = r + gamma*V_next - V, A = delta + gamma*lam*A_next, with next = next generated token. gamma and lam act once per generated token. Entries outside action_mask are 0 in the output and have no influence. No normalisation. Returns [rows, time]; constant."
)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    mask = torch.zeros(5, 22)
    for r in range(5):
        t = 2
        for _ in range(int(torch.randint(1, 4, (1,), generator=g))):
            n = int(torch.randint(2, 5, (1,), generator=g))
            mask[r, t:t + n] = 1
            t += n + int(torch.randint(1, 4, (1,), generator=g))
    rewards = torch.zeros(5, 22)
    for r in range(5):
        rewards[r, mask[r].nonzero()[-1, 0]] = float(torch.randn(1, generator=g))
    return {"rewards": rewards, "values": torch.randn(5, 22, generator=g), "action_mask": mask}


def right(rewards, values, action_mask, gamma=0.98, lam=0.9):
    adv = torch.zeros_like(rewards)
    nxt, carry = torch.zeros(rewards.shape[0]), torch.zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        m = action_mask[:, t]
        delta = rewards[:, t] + gamma * nxt - values[:, t]
        new = delta + gamma * lam * carry
        nxt = values[:, t] * m + nxt * (1 - m)
        carry = new * m + carry * (1 - m)
        adv[:, t] = carry
    return adv * action_mask


if __name__ == "__main__":
    for seed in range(3):
        d = make(seed)
        got, want = right(**d), torch.zeros(5, 22)
        for r in range(5):
            idx = d["action_mask"][r].nonzero()[:, 0].tolist()
            v, rew = d["values"][r][idx].tolist() + [0.0], d["rewards"][r][idx].tolist()
            for a in range(len(idx)):
                want[r, idx[a]] = sum((0.98 * 0.9) ** (b - a) * (rew[b] + 0.98 * v[b + 1] - v[b]) for b in range(a, len(idx)))
        print("seed", seed, "difference %.1e, row 0" % (got - want).abs().max(), [round(x, 2) for x in got[0].tolist()])
        assert torch.allclose(got, want, atol=1e-5)
