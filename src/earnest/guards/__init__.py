"""Guards: remove directions that must not be learned from every update or gradient."""

from __future__ import annotations

from earnest.guards.assemble import assemble
from earnest.guards.controls import Perturb, PerturbRoute, random_directions, shuffled_directions
from earnest.guards.directions import Directions
from earnest.guards.errors import GuardError, GuardWarning
from earnest.guards.extract import Triple, directions_from_activations, directions_from_gradients, read_triples
from earnest.guards.gates import Rule
from earnest.guards.guard import DirectionGuard, Erase, Route

__all__ = [
    "DirectionGuard",
    "Directions",
    "Erase",
    "GuardError",
    "GuardWarning",
    "Perturb",
    "PerturbRoute",
    "Route",
    "Rule",
    "Triple",
    "assemble",
    "directions_from_activations",
    "directions_from_gradients",
    "random_directions",
    "read_triples",
    "shuffled_directions",
]
