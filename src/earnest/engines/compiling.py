"""``engine.compile``: run each layer as one compiled graph (torch.compile) if a gradient is needed.

Sampling runs uncompiled, because its shapes change with every token. If a layer does not compile as one graph, or the
machine has no compiler, all layers run uncompiled from then on, and every step's ``layout`` has the reason.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from earnest.engines.sharding import blocks_of

_log = logging.getLogger("earnest.engines")


class CompiledLayers:
    """Makes the layers of ``body`` run compiled. ``reason`` is why they run uncompiled, or None."""

    def __init__(self, body: nn.Module, backend: str = "inductor") -> None:
        self.reason: str | None = None
        for block in blocks_of(body):
            plain = block.forward
            # fullgraph raises on a graph break; without it parts of a layer would run uncompiled without an error.
            fast = torch.compile(plain, backend=backend, fullgraph=True)
            block.forward = self._either(plain, fast)

    @property
    def note(self) -> str:
        """The text for a step's ``layout``."""
        return "compiled" if self.reason is None else f"not compiled ({self.reason})"

    def _either(self, plain: Any, fast: Any) -> Any:
        def _forward(*args: Any, **kwargs: Any) -> Any:
            if self.reason is None and torch.is_grad_enabled():
                try:
                    return fast(*args, **kwargs)
                except Exception as error:
                    # Other errors do not come from compiling, such as the one that ends a checkpoint's recomputation.
                    if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                        raise
                    words = " ".join(str(error).split("\n\n")[0].split())
                    self.reason = f"{type(error).__name__}: {words[:200]}"
                    _log.warning("engine.compile: layers run uncompiled: %s", self.reason)
            return plain(*args, **kwargs)

        return _forward
