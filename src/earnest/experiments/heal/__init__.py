"""``earnest run heal``: the steer-and-heal loop; with ``--full``, barriers compared at two choices of τ."""

from earnest.experiments.heal.check import prove as prove
from earnest.experiments.heal.config import HealConfig as Config
from earnest.experiments.heal.run import start as start

__all__ = ["Config", "prove", "start"]
