"""Reward scaling by the running deviation of the discounted RETURN: the reward is divided by it but its mean is NOT subtracted, the return is reset at episode ends AFTER it was counted, and the state (count, mean, M2 and the open returns) is saved (OpenAI baselines VecNormalize; gym NormalizeReward). Subtracting the mean would change the task."""
import copy
import math
import random

FAMILY = "saving and resuming"
KIND = "state"
INPUTS = {"rewards": "list over steps of a list over environments", "dones": "the same shape, True at the end of an episode"}
SETTINGS = {"gamma": "0.99", "clip": "scaled rewards cut to [-10, 10]", "eps": "1e-8"}
NOTES = "Statistics are updated before they are used. Population variance. Count starts at 1e-4 with variance 1, as in baselines. Resuming from state() in the middle gives the same numbers."


class ReturnScaler:
    def __init__(self, envs, gamma=0.99, clip=10.0, eps=1e-8):
        self.gamma, self.clip, self.eps = gamma, clip, eps
        self.ret = [0.0] * envs
        self.n, self.mean, self.m2 = 1e-4, 0.0, 1e-4

    def __call__(self, rewards, dones):
        self.ret = [self.gamma * a + r for a, r in zip(self.ret, rewards)]
        k = len(self.ret)
        mu = sum(self.ret) / k
        d, tot = mu - self.mean, self.n + k
        self.m2 += sum((x - mu) ** 2 for x in self.ret) + d * d * self.n * k / tot
        self.mean, self.n = self.mean + d * k / tot, tot
        sd = math.sqrt(self.m2 / self.n + self.eps)
        self.ret = [0.0 if e else a for a, e in zip(self.ret, dones)]
        return [max(-self.clip, min(self.clip, r / sd)) for r in rewards]

    def state(self):
        return copy.deepcopy({k: getattr(self, k) for k in ("ret", "n", "mean", "m2")})

    def load(self, s):
        self.__dict__.update(copy.deepcopy(s))


def make(seed):
    rng = random.Random(seed)
    return {"rewards": [[rng.gauss(2, 1) for _ in range(3)] for _ in range(20)], "dones": [[rng.random() < 0.2 for _ in range(3)] for _ in range(20)]}


def right(rewards, dones, gamma=0.99):
    s, out = ReturnScaler(len(rewards[0]), gamma), []
    for k, (r, e) in enumerate(zip(rewards, dones)):
        if k == len(rewards) // 2:                     # save and resume
            kept, s = s.state(), ReturnScaler(len(r), gamma)
            s.load(kept)
        out.append(s(r, e))
    return out


if __name__ == "__main__":
    d = make(0)
    out = right(**d)
    ret, seen = [0.0] * 3, []
    for k, (r, e) in enumerate(zip(d["rewards"], d["dones"])):
        ret = [0.99 * a + x for a, x in zip(ret, r)]
        seen += ret
        mu = sum(seen) / (len(seen) + 1e-4)            # prior of 1e-4 samples at zero, variance one
        var = (sum((x - mu) ** 2 for x in seen) + 1e-4 * mu * mu + 1e-4) / (len(seen) + 1e-4)
        want = [max(-10, min(10, x / math.sqrt(var + 1e-8))) for x in r]
        assert all(abs(a - b) < 1e-6 for a, b in zip(out[k], want)), k
        ret = [0.0 if x else a for a, x in zip(ret, e)]
    print("ok", out[-1], want)
