"""V-trace advantage bootstraps from the next trajectory at truncated steps. pytorch/rl#4209,
https://github.com/pytorch/rl/issues/4209, 2026 (fix pytorch/rl#4210). The policy-gradient advantage takes v_{s+1}
as the V-trace target shifted by one step along time; the value of the true next state is used for the last step of the
batch only. Where several trajectories stand one after the other, a truncated step in the middle therefore bootstraps
from the first state of the following trajectory."""
import torch

FAMILY = "advantages, returns and rewards"
KIND = "advantages"
INPUTS = {
    "rewards": "reward of each step, [time]; several trajectories stand one after the other",
    "groups": "trajectory number of each step, [time], non-decreasing; the last step of each number is where that trajectory ends",
    "terminated": "bool [time], true where the trajectory ends in a terminal state; an end without it is a truncation (time limit)",
    "values": "V of the state before each step, [time], constant",
    "next_values": "V of the state really reached after each step (before any reset), [time], constant; equals values[t+1] inside a trajectory",
    "log_rhos": "log pi(a|s) - log mu(a|s) of each step, [time], constant",
}
SETTINGS = {"gamma": "discount, 0.95", "rho_clip": "upper clip of the ratio in deltas and in the advantage, 1.0", "c_clip": "upper clip of the trace coefficient, 1.0"}
NOTES = ("IMPALA V-trace, no gradient. delta_t = min(rho_clip, rho_t) * (r_t + gamma * (1 - terminated_t) * next_values_t - values_t). "
         "The correction runs backward inside one trajectory only: vs_t - V_t = delta_t + gamma * c_t * (vs_{t+1} - V_{t+1}), cut at every trajectory end. "
         "Advantage_t = min(rho_clip, rho_t) * (r_t + gamma * (1 - terminated_t) * vs_next_t - values_t), where vs_next_t is vs_{t+1} inside a trajectory "
         "and next_values_t (the value of the state really reached) at the last step of a trajectory. Nothing of one trajectory enters another. "
         "Result: one advantage per step, [time]; no normalisation.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    lens = [3, 4, 2]
    groups = torch.cat([torch.full((n,), i) for i, n in enumerate(lens)])
    rewards = torch.randn(len(groups), generator=g)
    values, nexts = [], []
    for n in lens:
        v = torch.randn(n + 1, generator=g)
        values.append(v[:-1]); nexts.append(v[1:])
    terminated = torch.zeros(len(groups), dtype=torch.bool)
    terminated[6] = True                       # the second trajectory ends in a terminal state, the others are truncated
    return {"rewards": rewards, "groups": groups, "terminated": terminated, "values": torch.cat(values),
            "next_values": torch.cat(nexts), "log_rhos": 0.4 * torch.randn(len(groups), generator=g)}


def _targets(rewards, groups, terminated, values, next_values, log_rhos, gamma, rho_clip, c_clip):
    rho = log_rhos.exp()
    crho, c = rho.clamp(max=rho_clip), rho.clamp(max=c_clip)
    done = torch.ones_like(terminated)
    done[:-1] = groups[1:] != groups[:-1]
    disc = gamma * (~terminated).to(values.dtype)
    delta = crho * (rewards + disc * next_values - values)
    vs, acc = torch.zeros_like(values), torch.zeros((), dtype=values.dtype)
    for t in reversed(range(len(values))):
        acc = delta[t] + gamma * (~done[t]).to(values.dtype) * c[t] * acc
        vs[t] = acc + values[t]
    return vs, crho, disc, done


def broken(rewards, groups, terminated, values, next_values, log_rhos, gamma=0.95, rho_clip=1.0, c_clip=1.0):
    vs, crho, disc, done = _targets(rewards, groups, terminated, values, next_values, log_rhos, gamma, rho_clip, c_clip)
    vs_next = torch.cat([vs[1:], next_values[-1:]])
    return crho * (rewards + disc * vs_next - values)


def right(rewards, groups, terminated, values, next_values, log_rhos, gamma=0.95, rho_clip=1.0, c_clip=1.0):
    vs, crho, disc, done = _targets(rewards, groups, terminated, values, next_values, log_rhos, gamma, rho_clip, c_clip)
    vs_next = torch.where(done, next_values, torch.cat([vs[1:], next_values[-1:]]))
    return crho * (rewards + disc * vs_next - values)


if __name__ == "__main__":
    m = make(0)
    a, b = broken(**m), right(**m)
    print("broken", a); print("right ", b)
    split = torch.cat([right(**{k: v[m["groups"] == i] for k, v in m.items()}) for i in range(3)])
    assert torch.allclose(b, split) and (a - b).abs().max() > 1e-2
