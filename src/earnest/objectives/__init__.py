"""The maths of losses: pure functions of a batch's per-token scalars. A sum of weighted terms is an objective.

A file in this folder whose term has ``@register`` needs no line here: the registry finds it, and the term is
``earnest.objectives.<class name>``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from earnest.objectives.base import Evaluation as Evaluation
from earnest.objectives.base import Objective as Objective
from earnest.objectives.base import Term as Term
from earnest.objectives.base import Value as Value
from earnest.objectives.base import Weighted as Weighted
from earnest.objectives.distill import SDPO as SDPO
from earnest.objectives.distill import Distill as Distill
from earnest.objectives.entropy_aware import EntropyAware as EntropyAware
from earnest.objectives.importance import TruncatedIS as TruncatedIS
from earnest.objectives.kto import KTO as KTO
from earnest.objectives.policy_gradient import BNPO as BNPO
from earnest.objectives.policy_gradient import DAPO as DAPO
from earnest.objectives.policy_gradient import GRPO as GRPO
from earnest.objectives.policy_gradient import DrGRPO as DrGRPO
from earnest.objectives.preference import DPO as DPO
from earnest.objectives.preference import SimPO as SimPO
from earnest.objectives.reference_kl import ReferenceKL as ReferenceKL
from earnest.objectives.registry import OBJECTIVES as OBJECTIVES
from earnest.objectives.registry import build as build
from earnest.objectives.registry import build_objective as build_objective
from earnest.objectives.registry import describe as describe
from earnest.objectives.registry import register as register
from earnest.objectives.reinforce import RLOO as RLOO
from earnest.objectives.reinforce import Reinforce as Reinforce
from earnest.objectives.sequence_ratio import GSPO as GSPO
from earnest.objectives.sequence_ratio import LUSPO as LUSPO
from earnest.objectives.sft import SFT as SFT
from earnest.objectives.soft_clip import CISPO as CISPO
from earnest.objectives.soft_clip import SAPO as SAPO
from earnest.objectives.taid import TAID as TAID
from earnest.objectives.trust import EntropyBonus as EntropyBonus
from earnest.objectives.trust import KLBarrier as KLBarrier
from earnest.objectives.trust import SpectralCap as SpectralCap
from earnest.objectives.trust import calibrate_tau as calibrate_tau

if not TYPE_CHECKING:  # a type checker knows the names above, and finds misspelt ones

    def __getattr__(name: str) -> Any:
        if name[0].isupper():
            for term in OBJECTIVES.values():
                if term.__name__ == name:
                    return term
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
