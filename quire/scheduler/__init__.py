"""SCHEDULED: queues, policy, preemption. Decides every step; knows no tensors and no text."""

from __future__ import annotations

from quire.scheduler.config import SchedulerConfig
from quire.scheduler.preemption import PreemptionKind
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.types import Drafter, SchedulerStats, SequenceUpdate, TenantLoad, WaitReason

__all__ = [
    "Drafter",
    "PreemptionKind",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "SequenceUpdate",
    "TenantLoad",
    "WaitReason",
]
