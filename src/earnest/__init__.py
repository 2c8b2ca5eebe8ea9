"""Post-training of language models in which nothing fails silently.

Names are resolved when they are first used, so that importing earnest costs little more than nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "earnest.models": ("load", "Policy", "SampleSpec"),
    "earnest.adapters": (
        "attach",
        "load_adapter",
        "Adapter",
        "LoRA",
        "PiSSA",
        "DoRA",
        "DeLoRA",
        "IA3",
        "IA3FF",
        "HRA",
        "EVA",
        "AntiPaSTO",
        "ROAD",
        "OFT",
        "VeRA",
    ),
    "earnest.signals": ("Batch", "Teacher", "Reference", "FullLogits", "Hidden", "TopK", "Rollouts", "collect"),
    "earnest.objectives": (
        "BNPO",
        "CISPO",
        "DAPO",
        "DPO",
        "GRPO",
        "GSPO",
        "LUSPO",
        "RLOO",
        "SAPO",
        "SDPO",
        "SFT",
        "TAID",
        "Distill",
        "DrGRPO",
        "EntropyAware",
        "EntropyBonus",
        "KLBarrier",
        "Objective",
        "ReferenceKL",
        "Reinforce",
        "SimPO",
        "SpectralCap",
        "Term",
        "TruncatedIS",
    ),
    "earnest.engines": ("LocalEngine", "AdamW", "SGD", "StepReport"),
    "earnest.engines.tinker": ("TinkerEngine", "RemoteTeacher", "RemoteEMA"),
    "earnest.audit": ("prove", "Verdict"),
    "earnest.guards": (
        "Directions",
        "Erase",
        "Route",
        "Triple",
        "directions_from_activations",
        "directions_from_gradients",
    ),
    "earnest.steering": ("Vector", "calibrate_dose", "heal", "mean_difference"),
    "earnest.tasks": ("get_task",),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["__version__", *sorted(_WHERE)]  # noqa: PLE0604  (names are strings; they resolve lazily)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'earnest' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from earnest.adapters import EVA as EVA
    from earnest.adapters import HRA as HRA
    from earnest.adapters import IA3 as IA3
    from earnest.adapters import IA3FF as IA3FF
    from earnest.adapters import OFT as OFT
    from earnest.adapters import ROAD as ROAD
    from earnest.adapters import Adapter as Adapter
    from earnest.adapters import AntiPaSTO as AntiPaSTO
    from earnest.adapters import DeLoRA as DeLoRA
    from earnest.adapters import DoRA as DoRA
    from earnest.adapters import LoRA as LoRA
    from earnest.adapters import PiSSA as PiSSA
    from earnest.adapters import VeRA as VeRA
    from earnest.adapters import attach as attach
    from earnest.adapters import load_adapter as load_adapter
    from earnest.audit import Verdict as Verdict
    from earnest.audit import prove as prove
    from earnest.engines import SGD as SGD
    from earnest.engines import AdamW as AdamW
    from earnest.engines import LocalEngine as LocalEngine
    from earnest.engines import StepReport as StepReport
    from earnest.engines.tinker import RemoteEMA as RemoteEMA
    from earnest.engines.tinker import RemoteTeacher as RemoteTeacher
    from earnest.engines.tinker import TinkerEngine as TinkerEngine
    from earnest.guards import Directions as Directions
    from earnest.guards import Erase as Erase
    from earnest.guards import Route as Route
    from earnest.guards import Triple as Triple
    from earnest.guards import directions_from_activations as directions_from_activations
    from earnest.guards import directions_from_gradients as directions_from_gradients
    from earnest.models import Policy as Policy
    from earnest.models import SampleSpec as SampleSpec
    from earnest.models import load as load
    from earnest.objectives import BNPO as BNPO
    from earnest.objectives import CISPO as CISPO
    from earnest.objectives import DAPO as DAPO
    from earnest.objectives import DPO as DPO
    from earnest.objectives import GRPO as GRPO
    from earnest.objectives import GSPO as GSPO
    from earnest.objectives import LUSPO as LUSPO
    from earnest.objectives import RLOO as RLOO
    from earnest.objectives import SAPO as SAPO
    from earnest.objectives import SDPO as SDPO
    from earnest.objectives import SFT as SFT
    from earnest.objectives import TAID as TAID
    from earnest.objectives import Distill as Distill
    from earnest.objectives import DrGRPO as DrGRPO
    from earnest.objectives import EntropyAware as EntropyAware
    from earnest.objectives import EntropyBonus as EntropyBonus
    from earnest.objectives import KLBarrier as KLBarrier
    from earnest.objectives import Objective as Objective
    from earnest.objectives import ReferenceKL as ReferenceKL
    from earnest.objectives import Reinforce as Reinforce
    from earnest.objectives import SimPO as SimPO
    from earnest.objectives import SpectralCap as SpectralCap
    from earnest.objectives import Term as Term
    from earnest.objectives import TruncatedIS as TruncatedIS
    from earnest.signals import Batch as Batch
    from earnest.signals import FullLogits as FullLogits
    from earnest.signals import Hidden as Hidden
    from earnest.signals import Reference as Reference
    from earnest.signals import Rollouts as Rollouts
    from earnest.signals import Teacher as Teacher
    from earnest.signals import TopK as TopK
    from earnest.signals import collect as collect
    from earnest.steering import Vector as Vector
    from earnest.steering import calibrate_dose as calibrate_dose
    from earnest.steering import mean_difference as mean_difference
    from earnest.steering.heal import heal as heal
    from earnest.tasks import get_task as get_task
