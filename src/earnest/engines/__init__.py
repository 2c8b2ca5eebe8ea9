"""Engines run the training steps: ``LocalEngine`` in PyTorch here, ``TinkerEngine`` on a service. ``base.py`` has the
protocol."""

from earnest.engines.base import Engine as Engine
from earnest.engines.base import Guard as Guard
from earnest.engines.base import Outer as Outer
from earnest.engines.local import LocalEngine as LocalEngine
from earnest.engines.muon import Muon as Muon
from earnest.engines.optimizers import SGD as SGD
from earnest.engines.optimizers import AdamW as AdamW
from earnest.engines.optimizers import AdamW8bit as AdamW8bit
from earnest.engines.reports import StepReport as StepReport
from earnest.engines.reports import TermReport as TermReport
from earnest.engines.reports import UpdateReport as UpdateReport
from earnest.engines.schedules import WSD as WSD
from earnest.engines.schedules import Constant as Constant
from earnest.engines.schedules import Cosine as Cosine
from earnest.engines.schedules import Linear as Linear
from earnest.rollouts.rollout import Rollout as Rollout
from earnest.signals.scorer import AtIdsWanted as AtIdsWanted
from earnest.signals.scorer import HiddenWanted as HiddenWanted
from earnest.signals.scorer import LogitsWanted as LogitsWanted
from earnest.signals.scorer import LogProbsWanted as LogProbsWanted
from earnest.signals.scorer import TopKWanted as TopKWanted
