"""The modules that a vector acts on: their paths, their states at the assistant tag, and temporary hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from earnest.adapters.targets import default_targets, find_targets
from earnest.models.policy import Policy
from earnest.steering.errors import SteeringError

ActivationChange = Callable[[Tensor], Tensor]


def block_paths(policy: Policy, layers: Sequence[int] | None = None) -> tuple[str, ...]:
    """Paths of the policy's blocks (their output is the residual stream); negative numbers count from the end."""
    count = getattr(policy.model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    found = [
        name
        for name, module in policy.model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if count is None or not found:
        raise SteeringError(
            f"{type(policy.model).__name__} has no list of {count} blocks; give the paths of its modules."
        )
    numbers = list(range(count)) if layers is None else list(layers)
    if wrong := [i for i in numbers if not -count <= i < count]:
        raise SteeringError(f"layer {wrong[0]} does not exist; {policy.name} has the layers 0 to {count - 1}.")
    if not numbers:
        raise SteeringError("layers is empty; give at least one, or None for all.")
    return tuple(f"{found[0]}.{i % count}" for i in numbers)


def writer_paths(policy: Policy, layers: Sequence[int] | None = None) -> tuple[str, ...]:
    """Paths of the linear layers through which each block's feed-forward part writes into the stream."""
    found, _ = find_targets(policy.model, default_targets(policy.model, ("ffn_in",)), layers)
    return tuple(found)


def module_at(policy: Policy, path: str) -> nn.Module:
    try:
        return policy.model.get_submodule(path)
    except AttributeError:
        raise SteeringError(f"{policy.name} has no module {path!r}; the vector belongs to another model.") from None


def _first(output: Any) -> Tensor:
    """The states in a block's output: the output itself, or the first entry of a tuple."""
    found = output[0] if isinstance(output, tuple) else output
    assert isinstance(found, Tensor), "a block's output is a tensor, or a tuple that begins with one"
    return found


@contextmanager
def changed(policy: Policy, changes: Mapping[str, ActivationChange]) -> Iterator[None]:
    """Inside the block, apply each change to the output of its module; afterwards remove the hooks."""

    def hook(change: ActivationChange) -> Callable[[nn.Module, Any, Any], Any]:
        def run(_: nn.Module, __: Any, output: Any) -> Any:
            fresh = change(_first(output))
            return (fresh, *output[1:]) if isinstance(output, tuple) else fresh

        return run

    with ExitStack() as stack:
        for path, change in changes.items():
            stack.callback(module_at(policy, path).register_forward_hook(hook(change)).remove)
        yield


@torch.no_grad()
def tag_states(
    policy: Policy, prompts: Sequence[Sequence[int]], paths: Sequence[str], *, inputs: bool = False, rows: int = 64
) -> dict[str, Float[Tensor, "P d"]]:
    """Each module's output (or its input) at the last token of every prompt, in float32. A prompt rendered with its
    generation prompt ends in the assistant tag, just before the answer; it is the same token in every context."""
    if not prompts or not all(prompts):
        raise SteeringError("give at least one context, and at least one token in each; got an empty one.")
    parts: dict[str, list[Tensor]] = {path: [] for path in paths}
    for start in range(0, len(prompts), rows):
        part = prompts[start : start + rows]
        last = torch.tensor([len(p) - 1 for p in part], device=policy.device)
        ids = torch.full((len(part), int(last.max()) + 1), policy.pad_id, dtype=torch.long)
        for r, prompt in enumerate(part):
            ids[r, : len(prompt)] = torch.tensor(list(prompt))
        with ExitStack() as stack:
            for path in paths:
                keep = _keeper(parts[path], last, inputs)
                stack.callback(module_at(policy, path).register_forward_hook(keep).remove)
            policy.hidden(ids.to(policy.device))  # padded on the right: a causal model does not see it
    return {path: torch.cat(found) for path, found in parts.items()}


def _keeper(found: list[Tensor], last: Tensor, inputs: bool) -> Callable[[nn.Module, Any, Any], None]:
    def keep(_: nn.Module, args: Any, output: Any) -> None:
        states = args[0] if inputs else _first(output)
        found.append(states[torch.arange(len(last), device=last.device), last].float())

    return keep
