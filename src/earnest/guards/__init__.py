"""Guards: remove directions that must not be learned from every update or gradient."""

from earnest.guards.assemble import assemble as assemble
from earnest.guards.controls import Perturb as Perturb
from earnest.guards.controls import PerturbRoute as PerturbRoute
from earnest.guards.controls import random_directions as random_directions
from earnest.guards.controls import shuffled_directions as shuffled_directions
from earnest.guards.directions import Directions as Directions
from earnest.guards.errors import GuardError as GuardError
from earnest.guards.errors import GuardWarning as GuardWarning
from earnest.guards.extract import Triple as Triple
from earnest.guards.extract import directions_from_activations as directions_from_activations
from earnest.guards.extract import directions_from_gradients as directions_from_gradients
from earnest.guards.extract import read_triples as read_triples
from earnest.guards.gates import Rule as Rule
from earnest.guards.guard import DirectionGuard as DirectionGuard
from earnest.guards.guard import Erase as Erase
from earnest.guards.guard import Route as Route
