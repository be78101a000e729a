"""What an experiment on a real engine is given: how much to do, a loaded model, and what the others found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from quire.config import GIB, EngineConfig

if TYPE_CHECKING:
    from quire import LLMEngine
    from quire.bench.report import RunReport
    from quire.bench.workloads import Workload
    from quire.engine.variants import EngineVariants

T = TypeVar("T")

# A text for perplexity: plain prose of this project's own, in no model's training data.
PASSAGE = (Path(__file__).parent / "passage.txt").read_text(encoding="utf-8")
DEFAULT_MODEL = "smollm2"
LLAMA_8B_NAME = "llama-3.1-8b's shape, random weights"
MAX_NUM_SEQS = 256
MAX_STEP_TOKENS = 8192
# Samples kept of a run's time series: enough for a curve.
_MOST_SAMPLES = 80
_SHIFT = 4099
_SAMPLE_COLUMNS = ("t_s", "running", "waiting", "kv_usage", "waste_percent", "rss_bytes", "output_tokens")


class SkippedError(Exception):
    """The experiment cannot be done here; the text says what is missing. It is tried again the next time."""


@dataclass(slots=True, frozen=True)
class LabSettings:
    """What decides the numbers. Results made with the same settings need not be made again."""

    quick: bool = False
    seed: int = 0
    model: str = DEFAULT_MODEL
    load_format: str = "auto"
    gpu_8b: bool = False

    @property
    def model_name(self) -> str:
        return LLAMA_8B_NAME if self.gpu_8b else self.model

    def engine_config(self) -> EngineConfig:
        """The largest engine that any experiment asks for."""
        limits: dict[str, Any] = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_STEP_TOKENS}
        if self.gpu_8b:
            from quire.bench.model_shapes import write_llama_8b

            return EngineConfig(
                model=str(write_llama_8b()),
                load_format="dummy",
                device="cuda",
                max_model_len=8192,
                kv_cache_memory_bytes=20 * GIB,
                swap_space_gb=24.0,
                seed=self.seed,
                **limits,
            )
        return EngineConfig(
            model=self.model, load_format=self.load_format, device="cpu", swap_space_gb=0.5, seed=self.seed, **limits
        )


@dataclass(slots=True)
class LabContext:
    """Handed to every experiment's run()."""

    settings: LabSettings
    report: Callable[[str], None]  # takes a line of how far the experiment is
    # The data of the experiments that are done, by key.
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    quick: bool = field(init=False)
    seed: int = field(init=False)
    _bench: EngineVariants | None = None

    def __post_init__(self) -> None:
        self.quick, self.seed = self.settings.quick, self.settings.seed

    @property
    def on_gpu(self) -> bool:
        return self.settings.gpu_8b

    def pick(self, quick: T, full: T, gpu: T) -> T:
        """How much to do: on a CPU in a hurry or not, or on a GPU, which does a hundred times as much."""
        if self.on_gpu:
            return gpu
        return quick if self.quick else full

    @property
    def bench(self) -> EngineVariants:
        if self._bench is None:
            from quire.engine.variants import EngineVariants

            self.report(f"loading {self.settings.model_name}")
            self._bench = EngineVariants(self.settings.engine_config())
            self._warm_up(self._bench.engine())
        return self._bench

    def engine(self, **changes: Any) -> LLMEngine:
        return self.bench.engine(**changes)

    @property
    def vocab(self) -> int:
        from quire.bench.workloads import usable_vocab

        return usable_vocab(self.bench.base().spec.vocab_size)

    def measure(self, engine: LLMEngine, workload: Workload, name: str, **options: Any) -> RunReport:
        """Run it, after a short untimed one on a GPU, whose kernels are chosen and captured by size. Ctrl-C ends
        the experiment."""
        from quire.bench.measure import measure_repeats

        self.report(name)
        # The first touch of a cache and the first step of a size cost more than later ones.
        warm = [(self._other(prompt), max(2, num_out // 8)) for prompt, num_out in workload] if self.on_gpu else None
        report = measure_repeats(engine, workload, warm=warm, name=name, **options)
        if report.interrupted:
            raise KeyboardInterrupt
        return report

    def _other(self, prompt: list[int]) -> list[int]:
        """The same prompt in other tokens, which no cache knows. Prompts that are alike stay alike."""
        vocab = self.vocab
        return [(token + _SHIFT) % vocab for token in prompt]

    def probe_tok_s(self) -> float | None:
        """The speed of the same short run each time it is asked for: what the machine does meanwhile besides. None
        before there is a model."""
        if self._bench is None:
            return None
        from quire.bench.measure import measure
        from quire.bench.workloads import fixed

        engine = self._bench.engine(max_num_seqs=16, enable_prefix_caching=False)
        num_out = self.pick(8, 16, 64)
        return measure(engine, fixed(self.vocab, num=16, num_in=8, num_out=num_out)).output_tok_s

    def close(self) -> None:
        if self._bench is not None:
            self._bench.clear()
        self._bench = None

    def _warm_up(self, engine: LLMEngine) -> None:
        from quire.bench.measure import measure
        from quire.bench.workloads import fixed

        measure(engine, fixed(min(engine.spec.vocab_size, 1000), num=8, num_in=16, num_out=4))


def fastest(rounds: Sequence[RunReport]) -> RunReport:
    """The fastest of several rounds of one run, with the others as its repeats: whatever else a machine does makes a
    run slower, never faster."""
    from quire.bench.measure import merge_repeats

    chosen = max(rounds, key=lambda report: report.output_tok_s)
    merge_repeats(chosen, rounds)
    return chosen


def record(report: RunReport) -> dict[str, Any]:
    """A run as data for the report: the machine is named once, and curves need no more than some points."""
    data = report.to_json()
    for name in ("machine", "repeat_values", "point", "notes", "errors"):
        data.pop(name, None)
    samples = report.samples
    step = max(1, -(-len(samples) // _MOST_SAMPLES))
    kept = samples[::step]
    if samples and kept[-1] is not samples[-1]:
        kept.append(samples[-1])
    data["samples"] = {name: [round(getattr(sample, name), 4) for sample in kept] for name in _SAMPLE_COLUMNS}
    return data


def run_of(data: dict[str, Any]) -> RunReport:
    """The run behind a record, but for its curve: words are written from records, so that they can be written again."""
    from quire.bench.report import RunReport

    return RunReport.from_json({name: value for name, value in data.items() if name not in ("samples", "kind")})


def run_records(results: Mapping[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """(experiment, run) of every run that left samples."""
    return [
        (key, run)
        for key, data in results.items()
        for run in data.get("measured", [])
        if run.get("samples", {}).get("t_s")
    ]
