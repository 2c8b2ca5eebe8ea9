"""TRL's experimental package warns on import that it may change; the tests here compare with the version that is
pinned.
"""

import os

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
