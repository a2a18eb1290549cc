"""Until every test imports it from ``support``."""

from support.optimizer_helpers import *  # noqa: F403
