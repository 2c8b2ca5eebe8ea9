"""Signals of a batch besides its tokens: advantages, behaviour, reference, teachers."""

from earnest.signals.advantages import Advantages as Advantages
from earnest.signals.advantages import advantages as advantages
from earnest.signals.advantages import pairs_of as pairs_of
from earnest.signals.advantages import with_advantages as with_advantages
from earnest.signals.advantages import with_credit as with_credit
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
from earnest.signals.ema import EMATeacher as EMATeacher
from earnest.signals.lessons import Lesson as Lesson
from earnest.signals.lessons import lessons as lessons
from earnest.signals.lessons import strip_thinking as strip_thinking
from earnest.signals.reference import with_reference as with_reference
from earnest.signals.teachers import BaseTeacher as BaseTeacher
from earnest.signals.teachers import LiveTeacher as LiveTeacher
from earnest.signals.teachers import TeacherPolicy as TeacherPolicy
from earnest.signals.teachers import TrustRegionTeacher as TrustRegionTeacher
from earnest.signals.teachers import with_teacher as with_teacher
from earnest.signals.wants import Wants as Wants
