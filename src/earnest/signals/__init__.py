"""What a batch carries besides tokens: advantages, behaviour, reference, teachers."""

from earnest.signals.advantages import Advantages as Advantages
from earnest.signals.advantages import advantages as advantages
from earnest.signals.advantages import with_advantages as with_advantages
from earnest.signals.batch import ROLES as ROLES
from earnest.signals.batch import Batch as Batch
from earnest.signals.batch import Counts as Counts
from earnest.signals.batch import Reference as Reference
from earnest.signals.batch import Role as Role
from earnest.signals.batch import Teacher as Teacher
from earnest.signals.distributions import Distribution as Distribution
from earnest.signals.distributions import FullLogits as FullLogits
from earnest.signals.distributions import Hidden as Hidden
from earnest.signals.distributions import TopK as TopK
