"""``everywhere``: loss scaling for a trainer that makes its own optimizer and loss."""

from .context import Everywhere, everywhere

__all__ = ["Everywhere", "everywhere"]
