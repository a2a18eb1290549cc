"""Until every test imports it from ``support``."""

from support.kernel_arguments import *  # noqa: F403
