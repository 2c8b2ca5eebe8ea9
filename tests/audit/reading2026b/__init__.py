"""A second reading by strangers; see ``reading``."""

from tests.audit.reading2026b import declared_c_defects, declared_c_right, declared_d_defects, declared_d_right
from tests.audit.reading2026b.reading import READING

READING.sort()

__all__ = ["READING", "declared_c_defects", "declared_c_right", "declared_d_defects", "declared_d_right"]
