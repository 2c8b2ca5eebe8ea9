"""Layer-wise rate decay inside LambdaLR. One lambda per parameter group, so the groups have different rates on purpose (the embeddings 16 times less than the head), as in ELECTRA / BEiT fine-tuning; the warmup gives rate 0 to the first step, as transformers' get_linear_schedule_with_warmup does."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"optimizer": "torch optimizer whose groups each carry an integer key 'depth': 0 embeddings, 1..L layers, L+1 head; all groups have the same peak rate"}
SETTINGS = {"decay": "factor from one layer to the one below, 0.5", "warmup": "linear warmup steps, 10", "total": "steps after which all rates are 0, 100"}
NOTES = ("Makes a torch LambdaLR. Multiplier of a group = decay ** (max depth - depth) * linear warmup-decay. At step 0 all rates are 0 (convention of "
         "transformers: step / warmup); at total they are 0. scheduler.step() is called once after each optimizer.step(). Depth is read from the group, "
         "not from the group's position, and bound by a default argument of the lambda (no late binding).")
import torch


def right(optimizer, decay=0.5, warmup=10, total=100):
    top = max(g["depth"] for g in optimizer.param_groups)

    def base(t):
        if t < warmup:
            return t / max(1, warmup)
        return max(0.0, (total - t) / max(1, total - warmup))

    lambdas = [lambda t, d=g["depth"]: decay ** (top - d) * base(t) for g in optimizer.param_groups]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambdas)


def make(seed):
    torch.manual_seed(seed)
    model = torch.nn.ModuleList([torch.nn.Embedding(20, 8)] + [torch.nn.Linear(8, 8) for _ in range(3)] + [torch.nn.Linear(8, 20)])
    groups = [{"params": list(m.parameters()), "depth": i} for i, m in reversed(list(enumerate(model)))]
    return {"optimizer": torch.optim.SGD(groups, lr=0.1), "model": model}


if __name__ == "__main__":
    d = make(0)
    opt, sch = d["optimizer"], right(d["optimizer"])
    for t in range(101):
        b = t / 10 if t < 10 else (100 - t) / 90
        for g in opt.param_groups:
            assert abs(g["lr"] - 0.1 * 0.5 ** (4 - g["depth"]) * b) < 1e-9, (t, g["depth"])
        h = torch.arange(5)
        for m in d["model"]:
            h = m(h)
        opt.zero_grad(); h.pow(2).mean().backward()
        assert all(p.grad.abs().sum() > 0 for p in d["model"].parameters())
        if t == 10:
            print("peak rates by depth", {g["depth"]: g["lr"] for g in opt.param_groups})
        opt.step(); sch.step()
    print("ok, 101 steps x 5 groups equal to the explicit formula")
