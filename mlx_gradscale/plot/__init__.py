"""Plot runs, gradients and the headroom of layers. Requires the ``plot`` extra."""

from .gradients import plot_gradients
from .headroom import plot_headroom
from .history import main, plot_history

__all__ = ["main", "plot_gradients", "plot_headroom", "plot_history"]
