"""accelerate's AcceleratedScheduler (split_batches=False): the wrapped scheduler is stepped num_processes times per optimizer step, and the script (diffusers examples) makes the schedule num_processes times longer to match. Both together are right; each half alone looks like a bug."""
import torch

FAMILY = "learning-rate and other schedules"
KIND = "schedule"
INPUTS = {"optimizer": "SGD with learning rate 0.2 (the peak)"}
SETTINGS = {"warmup": "warm-up optimizer steps, 4", "total": "optimizer steps of the run, 20", "world": "number of processes, 8"}
NOTES = ("Makes a scheduler whose step() is called once per optimizer step. Rate of optimizer step u: peak*u/warmup for u < warmup, then peak*(total-u)/(total-warmup), not below 0 (the warm-up starts at 0, as in Hugging Face's linear schedule). "
         "The inner LambdaLR is written in per-process batches: its lengths are multiplied by `world`, and one step() advances it `world` times, so that the rate per optimizer step does not depend on the number of processes.")


class _Wrapped:
    def __init__(self, inner, world):
        self.inner, self.world, self.optimizer = inner, world, inner.optimizer

    def step(self):
        for _ in range(self.world):
            self.inner.step()

    def get_last_lr(self):
        return self.inner.get_last_lr()

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, d):
        self.inner.load_state_dict(d)


def make(seed):
    torch.manual_seed(seed)
    return {"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.randn(2))], lr=0.2)}


def right(optimizer, warmup=4, total=20, world=8):
    w, n = warmup * world, total * world

    def factor(k):
        return k / max(1, w) if k < w else max(0.0, (n - k) / max(1, n - w))
    return _Wrapped(torch.optim.lr_scheduler.LambdaLR(optimizer, factor), world)


if __name__ == "__main__":
    for world in (1, 8):
        o = make(0)["optimizer"]; s = right(o, world=world); lrs = []
        for u in range(20):
            lrs.append(round(o.param_groups[0]["lr"], 5)); o.step(); s.step()
        print(world, lrs)
