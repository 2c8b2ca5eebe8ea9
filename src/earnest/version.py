"""The version of earnest, which is also that of earnest-audit: one file has it."""

from earnest_audit.version import __version__ as __version__
