"""Drafting: how sequences may go on, guessed on the host, and how many guesses are worth a step's time."""

from quire.drafting.lookup import LookupDrafter
from quire.drafting.model import ModelDrafter

__all__ = ["LookupDrafter", "ModelDrafter"]
