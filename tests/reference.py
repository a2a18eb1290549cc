"""Until every test imports it from ``support``."""

from support.reference import *  # noqa: F403
