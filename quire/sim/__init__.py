"""Engines in virtual time: the real scheduler and block manager, and a cost model where the device would be."""

from __future__ import annotations

from quire.sim.cost import CostModel, SimClock
from quire.sim.drive import SimRun, StepView, poisson_arrivals
from quire.sim.traffic import SimRequest

__all__ = ["CostModel", "SimClock", "SimRequest", "SimRun", "StepView", "poisson_arrivals"]
