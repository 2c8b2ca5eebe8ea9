"""The head: from a hidden state to the logits, as data that a chunked pass over the vocabulary can use.

    z = cap · tanh(s · (W h + b) / cap)      without a cap: z = s · (W h + b)

The logits are computed in float32 or wider (float64 for float64 states) for every dtype of the model. In bf16 a
logit of 30 has a resolution of 0.125, so rounded logits would give the sampler other log-probs than the trainer.

    s     Cohere ``logit_scale`` (×), Granite ``logits_scaling`` (÷), Falcon-H1 ``lm_head_multiplier`` (×), …
    cap   Gemma ``final_logit_softcapping``  (arXiv 2408.00118, §2)

The head law: ``head.logits(policy.hidden(x)) == model(x).logits`` to rounding. The head is read from the config,
then checked on the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from earnest.errors import UnusableModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# config field -> whether the logits are multiplied (+1) or divided (-1) by it
_SCALES = {
    "logit_scale": +1,
    "logits_scaling": -1,
    "lm_head_multiplier": +1,
    "output_multiplier": +1,
    "logits_mup_width_multiplier": -1,
}
_MULTIPLIED_LOGITS_SCALING = {"hyperclovax"}  # these multiply by the field instead
SLICE_BYTES = 16 * 2**20


def widened_slices(
    weight: Float[Tensor, "V d"], dtype: torch.dtype, columns: int | None = None
) -> Iterator[tuple[slice, Float[Tensor, "v d"]]]:
    """The weight in ``dtype``, ``columns`` tokens of the vocabulary at a time. A weight of another dtype is converted
    slice by slice, so that no converted copy of the whole head exists."""
    V, d = weight.shape
    narrow = weight.dtype != dtype
    most = max(1, SLICE_BYTES // (d * dtype.itemsize)) if narrow else V
    step = min(V, most if columns is None else min(columns, most))
    widened = torch.empty(step, d, dtype=dtype, device=weight.device) if narrow else None
    for start in range(0, V, step):
        part = slice(start, min(V, start + step))
        yield part, weight[part] if widened is None else widened[: part.stop - start].copy_(weight[part])


@dataclass(frozen=True, eq=False)
class HeadSpec:
    """The output layer of a policy. ``weight`` and ``bias`` are read at every use, so changes by merging or training
    take effect."""

    module: nn.Module
    softcap: float | None
    scale: float | None
    tied: bool

    @property
    def weight(self) -> Float[Tensor, "V d"]:
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def width(self) -> int:
        """The size of a hidden state, without forming the weight of a trained head."""
        own = self.module._parameters.get("weight")
        return int((self.weight if own is None else own).shape[1])

    @property
    def bias(self) -> Float[Tensor, " V"] | None:
        bias = getattr(self.module, "bias", None)
        return bias if isinstance(bias, Tensor) else None

    @property
    def plain(self) -> bool:
        """Whether the logits are W h + b with the weight and bias of this class: no hook, no further parts."""
        module = self.module
        return (
            type(module).forward is nn.Linear.forward
            and "forward" not in vars(module)
            and not module._forward_hooks
            and not module._forward_pre_hooks
        )

    @property
    def fixed(self) -> bool:
        """Whether the head is plain and the same with and without the model's adapters."""
        return self.plain and type(self.module) is nn.Linear

    def logits(self, hidden: Float[Tensor, "*B d"]) -> Float[Tensor, "*B V"]:
        """The logits in float32 or wider. A head with an adapter runs as a module; its output is widened."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        if not self.plain:
            return self.shape(self.module(hidden).to(dtype))
        whole, bias = self.weight, self.bias  # read once: a trained head forms them at every access
        if hidden.dtype == dtype and whole.dtype == dtype:
            return self.shape(nn.functional.linear(hidden, whole, bias))
        if torch.is_grad_enabled() and (hidden.requires_grad or whole.requires_grad):
            raw = nn.functional.linear(hidden.to(dtype), whole.to(dtype))
        elif hidden.device.type == "cuda":  # 16-bit factors, float32 sums and float32 results, without a copy of W
            raw = torch.mm(hidden.flatten(0, -2), whole.t(), out_dtype=dtype).unflatten(0, hidden.shape[:-1])
        else:
            raw = hidden.new_empty(*hidden.shape[:-1], whole.shape[0], dtype=dtype)
            for part, weight in widened_slices(whole.detach(), dtype):
                raw[..., part] = hidden.to(dtype) @ weight.t()
        return self.shape(raw if bias is None else raw + bias.to(dtype))

    def shape(self, raw: Float[Tensor, "*B V"]) -> Float[Tensor, "*B V"]:
        """Scale, then cap, the output of the linear map."""
        if self.scale is not None:
            raw = raw * self.scale
        return raw if self.softcap is None else torch.tanh(raw / self.softcap) * self.softcap


def read_head(model: PreTrainedModel) -> HeadSpec:
    """The head as the config declares it; `check_head` tests it on the model."""
    module = model.get_output_embeddings()
    if module is None or not isinstance(getattr(module, "weight", None), Tensor) or module.weight.ndim != 2:
        raise UnusableModel(
            f"{type(model).__name__} has no linear output layer; earnest needs a causal LM whose head is one."
        )
    config: Any = model.config.get_text_config(decoder=True)
    scale = 1.0
    for field, power in _SCALES.items():
        value = getattr(config, field, None)
        if value is not None:
            sign = +1 if field == "logits_scaling" and config.model_type in _MULTIPLIED_LOGITS_SCALING else power
            scale *= float(value) ** sign
    softcap = getattr(config, "final_logit_softcapping", None)
    inputs = model.get_input_embeddings()
    return HeadSpec(
        module=module,
        softcap=None if softcap is None else float(softcap),
        scale=None if scale == 1.0 else scale,
        tied=inputs is not None and getattr(inputs, "weight", None) is module.weight,
    )


def check_head(model: PreTrainedModel, head: HeadSpec, hidden: Float[Tensor, "1 T d"], ids: Tensor) -> None:
    """Test the head law on a short input; a head that differs from its config is refused."""
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits.float()
        got = head.logits(hidden).float()
    room = (3e-2 if hidden.dtype.itemsize == 2 else 1e-4) * float(want.abs().max() + 1e-6)
    if want.shape != got.shape or not torch.allclose(want, got, rtol=0.0, atol=room):
        off = float((want - got).abs().max()) if want.shape == got.shape else float("nan")
        raise UnusableModel(
            f"{type(model).__name__} computes its logits in a way that earnest does not support "
            f"(difference {off:.3g} on a probe). Use an architecture with a plain linear head, such as Llama, Qwen, "
            "Gemma, GPT-2, Granite or Cohere."
        )
