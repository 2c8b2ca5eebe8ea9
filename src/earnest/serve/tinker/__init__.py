"""The Tinker API on the host's model: the unmodified ``tinker`` SDK trains and samples here. Imports no torch."""

from earnest.serve.tinker.routes import router as router
