"""Engines in virtual time: the real scheduler and block manager, and a cost model where the device would be."""

from __future__ import annotations

from quire.sim.cost import CostModel, SimClock
from quire.sim.drive import Arrival, SimRun, StepView, poisson_arrivals

__all__ = ["Arrival", "CostModel", "SimClock", "SimRun", "StepView", "poisson_arrivals"]
