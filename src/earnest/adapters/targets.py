"""The modules that a target pattern selects; a pattern that selects none is an error.

An adapter goes on linear layers, and on the experts of a mixture where they are named. Full-parameter training takes
every module that has parameters of its own, and there a name also selects the modules inside it: ``mlp`` is every
parameter of every ``mlp``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from earnest.adapters.errors import AdapterError
from earnest.adapters.layer import is_experts, is_linear_like
from earnest.adapters.runtime import SLOTS

# Default targets by role, of the first family found in the model:
# Llama/Qwen/Gemma/…, GPT-2, GPT-NeoX/Falcon, Phi, OPT/BERT.
ROLES: dict[str, tuple[tuple[str, ...], ...]] = {
    "attention": (("q_proj", "v_proj"), ("c_attn",), ("query_key_value",), ("qkv_proj",), ("query", "value")),
    "keys_values": (("k_proj", "v_proj"), ("c_attn",), ("query_key_value",), ("qkv_proj",), ("key", "value")),
    "ffn_in": (("down_proj",), ("mlp.c_proj",), ("dense_4h_to_h",), ("fc2",), ("output.dense",)),
}


@dataclass(frozen=True)
class Match:
    """The modules that one pattern matched."""

    pattern: str
    modules: tuple[str, ...]


def own_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module of the model by its path, without those of adapters."""
    return {n: m for n, m in model.named_modules() if SLOTS not in n.split(".")}


def linears(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear-like module by its path."""
    return {n: m for n, m in own_modules(model).items() if is_linear_like(m)}


def adaptable(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear-like module, and every module with the weights of experts, by path."""
    return {n: m for n, m in own_modules(model).items() if is_linear_like(m) or is_experts(m)}


def owners(model: nn.Module) -> dict[str, nn.Module]:
    """Every module with parameters of its own, by path. Of modules that share all of theirs, the first."""
    seen: set[int] = set()
    found = {}
    for name, module in model.named_modules():
        own = {id(p) for p in module._parameters.values() if p is not None}
        if SLOTS not in name.split(".") and own - seen:
            found[name] = module
        seen |= own
    return found


def block_index(name: str) -> int | None:
    """3 for 'model.layers.3.self_attn.q_proj'; None for 'lm_head'."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def _matches(pattern: str, name: str) -> bool:
    # PEFT's rule for a list of names: the whole path, or its tail after a dot.
    return name == pattern or name.endswith("." + pattern)


def _inside(pattern: str, name: str) -> bool:
    """Whether the module or one that contains it matches."""
    parts = name.split(".")
    return any(_matches(pattern, ".".join(parts[: i + 1])) for i in range(len(parts)))


def _head(model: nn.Module) -> nn.Module | None:
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    return head if isinstance(head, nn.Module) else None


def default_targets(model: nn.Module, roles: Iterable[str]) -> tuple[str, ...]:
    """The model family's names for these roles."""
    names = linears(model)
    found: list[str] = []
    for role in roles:
        family = next((f for f in ROLES[role] if all(any(_matches(p, n) for n in names) for p in f)), None)
        if family is None:
            tails = sorted({n.rsplit(".", 1)[-1] for n in names})
            raise AdapterError(f"no default targets for {type(model).__name__}; give targets= from: {', '.join(tails)}")
        found += family
    return tuple(dict.fromkeys(found))


def find_targets(
    model: nn.Module,
    targets: str | Sequence[str],
    layers: Iterable[int] | None,
    among: dict[str, nn.Module] | None = None,
) -> tuple[dict[str, nn.Module], tuple[Match, ...]]:
    """Modules by path (in model order) and the matches of each pattern.

    ``targets``: names (PEFT's rule: a path or its tail), ``"all-linear"`` (every linear but the output head, and no
    experts), or ``"re:…"`` (a regular expression for the whole path). ``layers`` restricts modules that belong to a
    numbered block; others, such as lm_head, are kept. A pattern or a layer that matches nothing is an error. ``among``:
    choose from these modules instead of the linears; there ``"all"`` is every one, and a name includes the modules
    inside it.
    """
    patterns = [targets] if isinstance(targets, str) else list(targets)
    if not patterns:
        raise AdapterError("targets is empty; name at least one, or 'all-linear'")
    names, matches_name = (adaptable(model), _matches) if among is None else (among, _inside)
    head, flat = _head(model), linears(model)
    blocks = sorted({i for n in names if (i := block_index(n)) is not None})
    wanted = None if layers is None else {_layer(i, blocks) for i in layers}
    if wanted is not None and not wanted:
        raise AdapterError("layers is empty; give layer numbers, or None for all")

    matches = []
    for pattern in patterns:
        if pattern == "all-linear":
            hits = [n for n, m in names.items() if n in flat and m is not head]
        elif pattern == "all" and among is not None:
            hits = list(names)
        elif pattern.startswith("re:"):
            hits = [n for n in names if re.fullmatch(pattern[3:], n)]
        else:
            hits = [n for n in names if matches_name(pattern, n)]
        kept = [n for n in hits if wanted is None or block_index(n) is None or block_index(n) in wanted]
        if not kept:
            raise AdapterError(_no_match(model, pattern, names, bool(hits), wanted, among))
        matches.append(Match(pattern, tuple(kept)))
    chosen = {n for match in matches for n in match.modules}
    if wanted is not None:
        bare = wanted - {block_index(n) for n in chosen}
        if bare:
            raise AdapterError(
                f"no target in layer(s) {sorted(bare)}: {', '.join(patterns)} match only in other layers"
            )
    return {n: names[n] for n in names if n in chosen}, tuple(matches)


def _layer(index: int, blocks: list[int]) -> int:
    where = index + len(blocks) if index < 0 else index
    if where not in blocks:
        raise AdapterError(
            f"layer {index} does not exist; the model has layers {blocks[0]}–{blocks[-1]}"
            if blocks
            else f"layer {index} does not exist; the model has no numbered layers"
        )
    return where


def _no_match(
    model: nn.Module,
    pattern: str,
    names: dict[str, nn.Module],
    hidden: bool,
    wanted: set[int] | None,
    among: dict[str, nn.Module] | None,
) -> str:
    if hidden:
        return f"target {pattern!r} matches no module in layers {sorted(wanted or ())}, only in others"
    other = [n for n, m in model.named_modules() if n and _matches(pattern, n) and n not in names]
    if other and among is not None:
        return (
            f"target {pattern!r} ({other[0]}) has no weight to train: the settings leave it out, or its weight is tied "
            "to another module's, which must be named instead"
        )
    if other:
        kind = type(model.get_submodule(other[0])).__name__
        return f"target {pattern!r} is a {kind} ({other[0]}), not a linear layer; target the linears in it"
    tails = sorted({n.rsplit(".", 1)[-1] for n in names} | {".".join(n.split(".")[-2:]) for n in names})
    near = difflib.get_close_matches(pattern, tails, n=3, cutoff=0.6)
    short = sorted({n.rsplit(".", 1)[-1] for n in names})
    hint = f"near misses: {', '.join(near)}; " if near else ""
    what, which = ("linear layer", "linear layers") if among is None else ("module with weights", "modules")
    return f"target {pattern!r} matches no {what} of {type(model).__name__}; {hint}the {which} are: {', '.join(short)}"
