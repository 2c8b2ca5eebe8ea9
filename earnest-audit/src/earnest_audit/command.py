"""For installations whose metadata names the command here; to be deleted when they are renewed."""

from earnest_audit.frontends.command import main as main
