"""Until every test imports it from ``support``."""

from support.graphs import *  # noqa: F403
from support.helpers import *  # noqa: F403

BEFORE_0_32 = False
