"""Until every test imports it from ``support``."""

from support.scaler_helpers import *  # noqa: F403
