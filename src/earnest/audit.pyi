from earnest_audit import *  # noqa: F403
