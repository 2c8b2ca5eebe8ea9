"""``watch``: the cheap laws, all through a run."""
