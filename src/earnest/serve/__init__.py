"""HTTP: chat that learns from what its users say, on one port.

Nothing here imports torch when it is imported: feedback is accepted, and safe on disk, before the model is loaded.
"""

from earnest.serve.settings import ServeSettings as ServeSettings
