"""Only the first micro-batch's weight gradient reaches main_grad. AMD-AGI/Primus#1046,
https://github.com/AMD-AGI/Primus/pull/1046, 2026. The custom backward adds the weight gradient to weight.main_grad only while the flag
grad_added_to_main_grad is False, and sets it. The flag is cleared once per iteration (zero_grad_buffer), not once per micro-batch, so with gradient
accumulation the gradients of all later micro-batches are dropped; the bridge returns a dummy to autograd, so nothing else adds them."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "updates (accumulation, clipping, optimizers)"
KIND = "update"
INPUTS = {
    "model": "two layers without bias; each weight has a float32 buffer weight.main_grad and a flag weight.grad_added_to_main_grad",
    "optimizer": "SGD over the weights; it reads weight.grad",
    "batches": "list of micro-batches (equal size), each a dict x [rows, features], y [rows] class ids",
}
SETTINGS = {}
NOTES = """One optimizer step with gradient accumulation. Loss of a micro-batch: mean cross-entropy over its rows; the objective is the mean of these
over the micro-batches (equal sizes, so the mean over all rows). Weight gradients are not collected by autograd: the layer's backward adds each
micro-batch's gradient to weight.main_grad in float32 and hands autograd a dummy of zeros. grad_added_to_main_grad = True tells the data-parallel
hook that main_grad already owns the gradient and that weight.grad must not be added on top; buffer and flag are cleared once per step, before the
first micro-batch. After the last micro-batch main_grad holds the gradient of the objective and is the gradient that the optimizer applies. The
result is the update of plain autograd on the same micro-batches. Any number of micro-batches."""


class Bridge(torch.autograd.Function):
    """x @ weight.T whose weight gradient goes to weight.main_grad."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        ctx.weight.main_grad.add_((g.t() @ x).float())
        ctx.weight.grad_added_to_main_grad = True
        return g @ weight, torch.zeros_like(weight)


class Net(nn.Module):
    bridge = Bridge

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(10, 6) * 0.4), nn.Parameter(torch.randn(4, 10) * 0.4)
        for w in self.parameters():
            w.main_grad, w.grad_added_to_main_grad = torch.zeros_like(w, dtype=torch.float32), False

    def forward(self, x):
        return self.bridge.apply(torch.tanh(self.bridge.apply(x, self.a)), self.b)


def make(seed):
    torch.manual_seed(seed)
    model = Net()
    batches = [{"x": torch.randn(5, 6), "y": torch.randint(0, 4, (5,))} for _ in range(4)]
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.3), "batches": batches}


class _Gated(Bridge):
    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        if not ctx.weight.grad_added_to_main_grad:
            ctx.weight.main_grad.add_((g.t() @ x).float())
            ctx.weight.grad_added_to_main_grad = True
        return g @ weight, torch.zeros_like(weight)


def broken(model, optimizer, batches):
    model.bridge = _Gated
    right(model, optimizer, batches)
    del model.bridge


def right(model, optimizer, batches):
    for w in model.parameters():
        w.main_grad.zero_()
        w.grad_added_to_main_grad = False
    for mb in batches:
        (F.cross_entropy(model(mb["x"]), mb["y"]) / len(batches)).backward()
    for w in model.parameters():
        w.grad = w.main_grad.to(w.dtype)
    optimizer.step()
    for w in model.parameters():
        w.grad = None


if __name__ == "__main__":
    i = make(0)
    a, b = (w.detach().clone().requires_grad_() for w in i["model"].parameters())
    loss = sum(F.cross_entropy(torch.tanh(mb["x"] @ a.t()) @ b.t(), mb["y"]) for mb in i["batches"]) / 4
    want = [w - 0.3 * g for w, g in zip((a, b), torch.autograd.grad(loss, (a, b)))]
    for f in (broken, right):
        i = make(0); f(**i)
        print(f.__name__, "distance to the autograd update", sum(float((w - t).detach().norm()) for w, t in zip(i["model"].parameters(), want)))
