"""``earnest run heal``: the steer-and-heal loop; with ``--full``, barriers compared at two choices of τ."""

from experiments.heal.check import prove as prove
from experiments.heal.config import HealConfig as Config
from experiments.heal.run import start as start

__all__ = ["Config", "prove", "start"]
