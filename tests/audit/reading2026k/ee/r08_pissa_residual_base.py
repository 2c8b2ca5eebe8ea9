"""PiSSA: LoRA whose factors start at the top singular vectors and whose frozen base weight is changed. Meng et al. 2024 (arXiv:2404.02948), PEFT init_lora_weights="pissa".
B does not start at zero; the frozen weight loses scaling * B @ A at the creation, so the output at the start is that of the original layer although base weight and adapter both differ from LoRA.
An adapter saved by itself does not fit the original base weight."""
import torch

FAMILY = "adapters, merging and low precision"
KIND = "adapter"
INPUTS = {"base": "torch.nn.Linear to be adapted; its weight is overwritten in place by the residual"}
SETTINGS = {"r": "rank, 3", "alpha": "6; the adapter is scaled with alpha / r"}
NOTES = ("returns a module with the frozen residual weight and trainable lora_A [r, in], lora_B [out, r]; at creation its output equals that of the original layer (up to rounding), and merging gives back the original weight. "
         "lora_A and lora_B are not zero; only these two are trainable; the bias is frozen.")


class Pissa(torch.nn.Module):
    def __init__(self, base, r, alpha):
        super().__init__()
        self.base, self.scaling = base, alpha / r
        u, s, vh = torch.linalg.svd(base.weight.detach(), full_matrices=False)
        root = (s[:r] / self.scaling).sqrt()
        self.lora_A = torch.nn.Parameter(root[:, None] * vh[:r])
        self.lora_B = torch.nn.Parameter(u[:, :r] * root)
        base.weight.data -= self.scaling * (self.lora_B @ self.lora_A).detach()
        for p in base.parameters():
            p.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling

    def merge(self):
        out = torch.nn.Linear(self.base.in_features, self.base.out_features)
        out.weight.data = self.base.weight + self.scaling * (self.lora_B @ self.lora_A).detach()
        out.bias.data = self.base.bias.detach().clone()
        return out


def make(seed):
    torch.manual_seed(seed)
    return {"base": torch.nn.Linear(10, 8)}


def right(base, r=3, alpha=6):
    return Pissa(base, r, alpha)


if __name__ == "__main__":
    original = make(0)["base"]
    m = right(**make(0))
    x = torch.randn(5, 10)
    print("difference at the start", (m(x) - original(x)).abs().max().item(), "change of the base weight", (m.base.weight - original.weight).norm().item())
    assert torch.allclose(m(x), original(x), atol=1e-5) and torch.allclose(m.merge().weight, original.weight, atol=1e-6)
    opt = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
    m(x).pow(2).mean().backward()
    assert m.lora_A.grad.norm() > 0 and m.lora_B.grad.norm() > 0 and m.base.weight.grad is None
    opt.step()
    assert torch.allclose(m.merge()(x), m(x), atol=1e-5) and not torch.allclose(m(x), original(x), atol=1e-3)
