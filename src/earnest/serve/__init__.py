"""HTTP: chat that learns from its users' feedback, on one port.

Importing this package does not import torch, so the server accepts feedback, and writes it to disk, before the model is
loaded.
"""

from earnest.serve.settings import ServeSettings as ServeSettings
