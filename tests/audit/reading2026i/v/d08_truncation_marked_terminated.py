"""An episode cut by the end of the data counts as terminated. TorchTrade/torchtrade#150,
https://github.com/TorchTrade/torchtrade/issues/150, 2026. The environment set terminated = truncated or done, so the
value of the state after a cut was never bootstrapped. All estimators (here GAE) took the future of a cut episode for
worth nothing."""
import torch

FAMILY = "losses"
KIND = "advantages"
INPUTS = {"rewards": "[time]", "values": "critic's value of each state [time]", "next_values": "critic's value of each next state, before any reset [time]",
          "bankrupt": "True where the account was liquidated (environment's own end) [time]",
          "data_end": "True where the price data ran out (time limit) [time]"}
SETTINGS = {"gamma": "discount, 0.99", "lmbda": "GAE lambda, 0.95"}
NOTES = ("GAE over a stream of consecutive episodes. done = terminated or truncated stops the recursion; only terminated "
         "zeroes the bootstrap of the next value, after a truncation the next value counts.")


def make(seed):
    torch.manual_seed(seed)
    t = 20
    bankrupt, data_end = torch.zeros(t, dtype=torch.bool), torch.zeros(t, dtype=torch.bool)
    bankrupt[5], data_end[12], data_end[19] = True, True, True
    return {"rewards": torch.randn(t), "values": torch.randn(t) + 2, "next_values": torch.randn(t) + 2, "bankrupt": bankrupt,
            "data_end": data_end, "gamma": 0.99, "lmbda": 0.95}


def gae(rewards, values, next_values, done, terminated, gamma, lmbda):
    adv, last = torch.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_values[t] * (~terminated[t]).float() - values[t]
        last = delta + gamma * lmbda * (~done[t]).float() * last
        adv[t] = last
    return adv


def broken(rewards, values, next_values, bankrupt, data_end, gamma=0.99, lmbda=0.95):
    truncated = data_end
    done = truncated | bankrupt
    terminated = truncated | bankrupt
    return gae(rewards, values, next_values, done, terminated, gamma, lmbda)


def right(rewards, values, next_values, bankrupt, data_end, gamma=0.99, lmbda=0.95):
    truncated = data_end
    done = truncated | bankrupt
    terminated = bankrupt
    return gae(rewards, values, next_values, done, terminated, gamma, lmbda)


if __name__ == "__main__":
    d = make(0)
    b, r = broken(**d), right(**d)
    print("last step of cut episode", b[12].item(), r[12].item(), " of the bankrupt one", b[5].item(), r[5].item())
    assert (b - r).abs().max() > 0.1 and torch.equal(b[:6], r[:6])
