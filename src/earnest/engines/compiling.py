"""``engine.compile``: each layer as one compiled graph (torch.compile), where a gradient is needed.

Sampling runs uncompiled: its shapes change with every token. A layer that does not compile whole, or a machine without
a compiler, runs uncompiled from then on, and every step's ``layout`` has the reason.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from earnest.engines.sharding import blocks_of

_log = logging.getLogger("earnest.engines")


class CompiledLayers:
    """The layers of ``body`` run compiled from now on. ``reason``: why they do not; None while they do."""

    def __init__(self, body: nn.Module, backend: str = "inductor") -> None:
        self.reason: str | None = None
        for block in blocks_of(body):
            plain = block.forward
            # One graph or an error: with a break in it a layer would run uncompiled without a word.
            fast = torch.compile(plain, backend=backend, fullgraph=True)
            block.forward = self._either(plain, fast)

    @property
    def note(self) -> str:
        """For a step's layout."""
        return "compiled" if self.reason is None else f"not compiled ({self.reason})"

    def _either(self, plain: Any, fast: Any) -> Any:
        def _forward(*args: Any, **kwargs: Any) -> Any:
            if self.reason is None and torch.is_grad_enabled():
                try:
                    return fast(*args, **kwargs)
                except Exception as error:
                    # Others are not about compiling, such as the one with which checkpointing ends a recomputation.
                    if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                        raise
                    words = " ".join(str(error).split("\n\n")[0].split())
                    self.reason = f"{type(error).__name__}: {words[:200]}"
                    _log.warning("engine.compile: layers run uncompiled: %s", self.reason)
            return plain(*args, **kwargs)

        return _forward
