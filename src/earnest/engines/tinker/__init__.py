"""earnest's objectives on a Tinker service; ``engine.py`` has the engine, ``samples.py`` the samples of
distillation."""

from earnest.engines.tinker.engine import TinkerEngine as TinkerEngine
from earnest.engines.tinker.samples import RemoteSample as RemoteSample
from earnest.engines.tinker.samples import ScalarSample as ScalarSample
from earnest.engines.tinker.samples import TopKSample as TopKSample
from earnest.engines.tinker.samples import batch_of as batch_of
from earnest.engines.tinker.teachers import RemoteEMA as RemoteEMA
from earnest.engines.tinker.teachers import RemoteTeacher as RemoteTeacher
