"""Steering: vectors from contrasts, a dose in nats, a filter, and training on steered samples."""

from earnest.deprecated import old_names
from earnest.steering.controller import walk_down as walk_down
from earnest.steering.dose import calibrate_dose as calibrate_dose
from earnest.steering.errors import Collapsed as Collapsed
from earnest.steering.errors import SteeringError as SteeringError
from earnest.steering.errors import SteeringWarning as SteeringWarning
from earnest.steering.errors import TooFewSurvivors as TooFewSurvivors
from earnest.steering.evaluate import TraitEvaluation as TraitEvaluation
from earnest.steering.evaluate import TraitEvaluator as TraitEvaluator
from earnest.steering.filter import Filter as Filter
from earnest.steering.filter import read as read
from earnest.steering.filter import separation as separation
from earnest.steering.heal import Healing as Healing
from earnest.steering.heal import heal as heal
from earnest.steering.vectors import Contrast as Contrast
from earnest.steering.vectors import Vector as Vector
from earnest.steering.vectors import mean_difference as mean_difference
from earnest.steering.vectors import principal as principal
from earnest.steering.vectors import weight_space as weight_space

__getattr__ = old_names(globals(), {"Starved": "TooFewSurvivors", "Yardstick": "TraitEvaluator"})
