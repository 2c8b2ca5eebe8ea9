"""For installations whose metadata names the plugin here; to be deleted when they are renewed."""

from earnest_audit.frontends.pytest_plugin import *  # noqa: F403
