"""Layers that the ranks of a team share: which ones, by the model's own plan, and what cannot be shared.

The plan is transformers' ``tp_plan``: it names the linear layers that are cut by their outputs (``colwise``) or by
their inputs (``rowwise``). ``adapters.split`` computes with the parts. Embeddings, norms and head are whole on every
rank. In the vocabulary pass each rank of a team computes some of the rows (``micro.shared``), so its work is divided as
with a vocabulary in parts, and no softmax needs an exchange.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from earnest.adapters.layer import is_dense
from earnest.adapters.runtime import set_base_class, slots_of
from earnest.adapters.split import Cut, Split, SplitLinear, Team
from earnest.engines.mesh import Mesh
from earnest.errors import ConfigError

if TYPE_CHECKING:
    from earnest.adapters import Adapter
    from earnest.models.policy import Policy

STYLES: dict[str, Cut | None] = {"colwise": "columns", "rowwise": "rows", "replicated_with_grad_allreduce": None}
"""The styles of a plan that are supported. The last one is for small weights that every rank has; here they are
frozen, so they need no exchange."""
CLOSE, NARROW = 1e-4, 5e-2
"""The largest relative difference of hidden states that another order of the same sums can cause, in 32 and 16 bits."""


def split(policy: Policy, adapter: Adapter, mesh: Mesh) -> Team:
    """Give this rank its part of every layer in the plan, in place. Hashes of the whole base are taken before."""
    layers = plan_of(policy, mesh.tensor)
    _refuse(adapter, layers)
    _, _, _ = policy.head, policy.fingerprint(), adapter.base_fingerprint
    mesh.kind = policy.device.type
    team = Team(mesh.rank % mesh.tensor, mesh.tensor, mesh.devices["tensor"].get_group())
    before = _probe(policy)
    for path, cut in layers.items():
        _cut(policy.body.get_submodule(path), Split(cut, team))
    after = _probe(policy)
    apart = float((after - before).norm() / before.norm())
    if not apart <= (NARROW if policy.dtype.itemsize == 2 else CLOSE):
        raise ConfigError(
            f"engine.tensor: with the layers of {policy.name} cut by its own plan the hidden states change by "
            f"{apart:.2g} of their length; set engine.tensor=1 and use engine.shard."
        )
    return team


def plan_of(policy: Policy, count: int) -> dict[str, Cut]:
    """Path in the body → how the layer is cut, for every layer of the model's plan; raises if ``count`` ranks cannot
    share them."""
    config: Any = policy.model.config.get_text_config(decoder=True)
    plan = getattr(config, "base_model_tp_plan", None) or {}
    found: dict[str, Cut] = {}
    sizes = [getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
    for path, module in policy.body.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))
        if style is None:
            continue
        if style not in STYLES:
            raise ConfigError(
                f"engine.tensor: the plan of {policy.name} has the style {style!r} for {path}, which is not supported; "
                "set engine.tensor=1 and use engine.shard."
            )
        cut = STYLES[style]
        if cut is None:
            continue
        slots = slots_of(module)
        own = slots[0].layer.base_class if slots else type(module)
        if own is not nn.Linear or not isinstance(module, nn.Linear) or not is_dense(module.weight):
            raise ConfigError(
                f"engine.tensor: {path} is a {own.__name__}, and only dense linear layers are cut; set "
                "engine.tensor=1 and use engine.shard."
            )
        found[path] = cut
        sizes.append(module.out_features if cut == "columns" else module.in_features)
    if not found:
        raise ConfigError(
            f"engine.tensor: {type(policy.model).__name__} has no plan for tensor parallelism (tp_plan in "
            "transformers); set engine.tensor=1 and use engine.shard."
        )
    most = math.gcd(*(size for size in sizes if size))
    if most % count:
        allowed = ", ".join(str(k) for k in range(1, most + 1) if most % k == 0)
        raise ConfigError(
            f"engine.tensor: {count} ranks cannot share the heads and layers of {policy.name} equally; take one of "
            f"{allowed}."
        )
    return found


def _refuse(adapter: Adapter, layers: dict[str, Cut]) -> None:
    """Raise if the adapter does more to a layer than adding factors, or is on a layer that is not cut."""
    kind = adapter.variant
    more = kind.reads_base or any(kind.uses(hook) for hook in ("before", "after", "replace"))
    if adapter.saved_modules or not kind.uses("factors") or more:
        what = "modules_to_save" if adapter.saved_modules else f"kind {kind.name}"
        raise ConfigError(
            f"adapter.{what}: is not a product of factors beside the layer, so its layers cannot be shared by ranks; "
            "take lora, or set engine.tensor=1 and use engine.shard."
        )
    for path in adapter.slots:
        if not any(path == name or path.endswith(f".{name}") for name in layers):
            raise ConfigError(
                f"adapter.targets: {path} is not in the model's plan for tensor parallelism; target layers that are, "
                f"such as {next(iter(layers)).rpartition('.')[2]}, or set engine.tensor=1."
            )


def _cut(module: nn.Module, own: Split) -> None:
    """Replace the weight by this rank's part, and let the layer exchange what the cut needs."""
    assert isinstance(module, nn.Linear)
    names = ("weight", "bias") if own.cut == "columns" else ("weight",)
    for name in names:
        whole = getattr(module, name)
        if whole is not None:
            part = nn.Parameter(own.part(whole.detach()).clone(), requires_grad=False)
            module.register_parameter(name, part)
    for slot in slots_of(module):
        slot.layer.split = own
    set_base_class(module, SplitLinear)
    vars(module)["split"] = own
    module.register_forward_pre_hook(own.entering)
    module.register_forward_hook(own.leaving)


@torch.no_grad()
def _probe(policy: Policy) -> Tensor:
    """Hidden states of a few tokens, in float64."""
    ids = torch.arange(8, device=policy.device) * 7 % policy.head.weight.shape[0]
    return policy.hidden(ids[None]).double()
