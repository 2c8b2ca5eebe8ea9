"""The laws of a training step, one file each, in the order in which they are checked."""

from importlib import import_module

from earnest_audit.law import Law

MODULES = (
    "liveness inputs knobs on_policy ratio clipping rewards at_reference likelihood identical pairs "
    "splits masks documents coverage shift paths metrics definitions averages pair_metrics "
    "finite_difference direction shadow"
)
LAWS: tuple[Law, ...] = tuple(import_module(f"{__name__}.{name}").LAW for name in MODULES.split())
