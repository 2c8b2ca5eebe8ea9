"""The maths of losses: pure functions of a batch's per-token scalars, each naming its paper. A sum of weighted terms is an objective."""

from earnest.objectives.base import Evaluation as Evaluation
from earnest.objectives.base import Objective as Objective
from earnest.objectives.base import Term as Term
from earnest.objectives.base import Value as Value
from earnest.objectives.base import Weighted as Weighted
from earnest.objectives.importance import TruncatedIS as TruncatedIS
from earnest.objectives.policy_gradient import BNPO as BNPO
from earnest.objectives.policy_gradient import DAPO as DAPO
from earnest.objectives.policy_gradient import GRPO as GRPO
from earnest.objectives.policy_gradient import DrGRPO as DrGRPO
from earnest.objectives.registry import OBJECTIVES as OBJECTIVES
from earnest.objectives.registry import build as build
from earnest.objectives.registry import build_objective as build_objective
from earnest.objectives.registry import describe as describe
from earnest.objectives.registry import register as register
from earnest.objectives.sft import SFT as SFT
