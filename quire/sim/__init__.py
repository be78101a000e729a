"""A simulated executor behind the real one's contract: no model, but exact bookkeeping and a cost model."""

from __future__ import annotations

from quire.sim.cost import CostModel, SimClock
from quire.sim.drive import Arrival, SimRun, StepView, poisson_arrivals
from quire.sim.executor import SimExecutor
from quire.sim.language import ToyLanguage

__all__ = ["Arrival", "CostModel", "SimClock", "SimExecutor", "SimRun", "StepView", "ToyLanguage", "poisson_arrivals"]
