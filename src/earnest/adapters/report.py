"""The result of attach: which layers matched, with which sizes and dtypes."""

from __future__ import annotations

from dataclasses import dataclass

from earnest.adapters.targets import Match, block_index


@dataclass(frozen=True)
class AttachReport:
    """Modules per target pattern, parameters, dtypes, and the tensors that are inactive at initialization."""

    name: str
    variant: str
    settings: dict[str, object]
    matches: tuple[Match, ...]
    modules: tuple[str, ...]
    blocks: int  # numbered blocks in the model
    trainable: int
    frozen: int  # numbers in frozen tensors (bases, copies)
    base: int  # numbers in the base model
    base_dtype: str
    kinds: tuple[str, ...]  # linear, conv1d, opaque
    inactive: tuple[str, ...]
    calibration_tokens: int

    def __str__(self) -> str:
        settings = ", ".join(f"{k}={v!r}" for k, v in self.settings.items())
        share = 100 * self.trainable / max(1, self.base)
        lines = [
            f"{self.variant}({settings}) as {self.name!r}: {len(self.modules)} layers, {self.trainable:,} trainable "
            f"fp32 parameters ({share:.2f} % of {self.base:,}), base {self.base_dtype} ({', '.join(self.kinds)})"
        ]
        for match in self.matches:
            blocks = {block_index(n) for n in match.modules} - {None}
            where = f" in {len(blocks)} of {self.blocks} blocks" if blocks else ""
            lines.append(f"  {match.pattern}: {len(match.modules)} modules{where}")
        if self.frozen:
            lines.append(f"  frozen tensors: {self.frozen:,} numbers")
        if self.inactive:
            lines.append(f"  no gradient at step 1, by design: {', '.join(self.inactive)}")
        if self.calibration_tokens:
            lines.append(f"  calibrated on {self.calibration_tokens:,} tokens")
        return "\n".join(lines)
