"""What the engine asks of an executor. The simulated one in quire/sim keeps the same contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from quire.plan import StepPlan, StepResult

if TYPE_CHECKING:
    from quire.executor.adapter_slots import AdapterSlots
    from quire.executor.device import Backend
    from quire.executor.encoder import EncoderExecutor
    from quire.executor.local import LocalExecutor
    from quire.executor.memory import MemoryLedger
    from quire.executor.rank_executor import RankExecutor
    from quire.executor.rank_messages import RankBackend
    from quire.grammar import GrammarCompiler


class Executor(Protocol):
    """Runs plans in the order in which they are submitted."""

    @property
    def depth(self) -> int:
        """How many plans may be submitted before the first of them is collected."""

    def submit(self, plan: StepPlan) -> int:
        """Start a step; returns a ticket. May return before the step has run."""

    def collect(self, ticket: int) -> StepResult:
        """Wait for a submitted step. Tickets are collected in submission order."""

    def is_idle(self) -> bool:
        """Whether everything that was submitted has run."""

    def has_time(self) -> bool:
        """Whether the oldest step still runs, and the host may prepare something meanwhile."""

    def prepare_more(self) -> bool:
        """A piece of the host's work that later steps are spared. False when there is none left."""

    def close(self) -> None:
        """Give memory and threads back. Nothing may be submitted afterwards."""


@runtime_checkable
class SleepingExecutor(Executor, Protocol):
    """One that can give its memory back for a while."""

    def prepare_sleep(self) -> None:
        """Do the parts that may fail. Raises a QuireError, and nothing has changed then."""

    def fall_asleep(self, kept_blocks: list[int]) -> None:
        """Nothing may be under way. The content of these blocks of the cache outlives the sleep."""

    def wake_up(self) -> None: ...


@dataclass(slots=True, frozen=True)
class BuiltExecutor:
    """An executor and the numbers that were settled while it was built."""

    executor: LocalExecutor | RankExecutor | EncoderExecutor
    backend: Backend | RankBackend
    ledger: MemoryLedger
    max_num_seqs: int
    max_num_batched_tokens: int
    swap_bytes_per_s: float | None
    timeline_s: dict[str, float]
    max_draft_position: int | None = None  # tokens that its draft model knows; None: it has none
    adapters: AdapterSlots | None = None  # None: it serves none
    grammars: GrammarCompiler | None = None  # None: it follows no grammars, and requests that have one are refused
