"""GAE seeds the backward carry with the bootstrap value. simonsays1980/rl-triton#4,
https://github.com/simonsays1980/rl-triton/pull/4, 2026. The scan started from A[T] = V(s_T) although V(s_T) is already
inside delta[T-1] as the next value, so every advantage of a window that is cut before its end was too large by
(gamma*lambda)^(T-t) * V(s_T). It vanishes when the episode ends at the window edge, which is why the tests passed."""
import torch

FAMILY = "advantages, returns and rewards"
KIND = "advantages"
INPUTS = {
    "rewards": "reward received after action t, [rows, time]",
    "values": "critic value of the state before action t, [rows, time]",
    "dones": "1 where action t ended the episode (the next state belongs to a new episode), [rows, time]",
    "bootstrap": "critic value of the state after the last action of the window, [rows]; has no effect where the last action ended the episode",
}
SETTINGS = {"gamma": "discount, 0.99", "lam": "GAE lambda, 0.95"}
NOTES = (
    "Generalised advantage estimation over fixed windows of a longer rollout; a window may be cut in the middle of an episode and is then "
    "bootstrapped. delta_t = r_t + gamma*(1-done_t)*V_{t+1} - V_t with V_T = bootstrap; A_t = delta_t + gamma*lam*(1-done_t)*A_{t+1}, "
    "and the sum of deltas ends with the window (deltas beyond the window are unknown and count as 0). With lam = 1 the advantage "
    "is the discounted reward sum plus the discounted bootstrap minus V_t. No normalisation. Rows are independent. "
    "Returns a tensor [rows, time]; nothing here has a gradient."
)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rewards = torch.randn(5, 9, generator=g)
    values = torch.randn(5, 9, generator=g)
    dones = (torch.rand(5, 9, generator=g) < 0.12).float()
    dones[0] = 0
    bootstrap = torch.randn(5, generator=g)
    return {"rewards": rewards, "values": values, "dones": dones, "bootstrap": bootstrap}


def broken(rewards, values, dones, bootstrap, gamma=0.99, lam=0.95):
    adv = torch.zeros_like(rewards)
    nxt, carry = bootstrap, bootstrap
    for t in reversed(range(rewards.shape[1])):
        live = 1 - dones[:, t]
        delta = rewards[:, t] + gamma * live * nxt - values[:, t]
        carry = delta + gamma * lam * live * carry
        adv[:, t] = carry
        nxt = values[:, t]
    return adv


def right(rewards, values, dones, bootstrap, gamma=0.99, lam=0.95):
    adv = torch.zeros_like(rewards)
    nxt, carry = bootstrap, torch.zeros_like(bootstrap)
    for t in reversed(range(rewards.shape[1])):
        live = 1 - dones[:, t]
        delta = rewards[:, t] + gamma * live * nxt - values[:, t]
        carry = delta + gamma * lam * live * carry
        adv[:, t] = carry
        nxt = values[:, t]
    return adv


if __name__ == "__main__":
    for s in range(3):
        d = make(s)
        b, r = broken(**d), right(**d)
        print("seed", s, "largest difference %.4f, last column broken %s right %s" % ((b - r).abs().max(), b[:3, -1].tolist(), r[:3, -1].tolist()))
        assert (b - r).abs().max() > 1e-2
        d["dones"].zero_()
        mc = torch.zeros_like(d["rewards"])
        ret = d["bootstrap"]
        for t in reversed(range(9)):
            ret = d["rewards"][:, t] + 0.99 * ret
            mc[:, t] = ret - d["values"][:, t]
        assert torch.allclose(right(**d, lam=1.0), mc, atol=1e-5) and not torch.allclose(broken(**d, lam=1.0), mc, atol=1e-2)
