"""What a step costs on this machine, from the steps that `quire bench profile --output-json` recorded.

A step's time is taken to be a polyline of the rows that are multiplied, with corners at powers of two, plus so much
for each row of logits, for each token of context that decodes read, and for each pair of query and key in prompts.
The numbers are found once, by least squares over all steps of the file with none of them below zero, and scaled so
that the steps of the file take as long in all as they did. How far single steps stray from that is kept, and drawn
from: on a machine with other work, the slowest percent is made of it.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from quire.bench.profile import STEP_COLUMNS
from quire.bench.report import BenchFile, RunReport
from quire.errors import ConfigError
from quire.sim.cost import StepCost
from quire.step_costs import StepLoad

if TYPE_CHECKING:
    import numpy as np

_MIN_STEPS = 50
_ROUNDS = 400  # of coordinate descent, which ends long before
_SETTINGS = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")


@dataclass(slots=True)
class ProfileCost(StepCost):
    """`strays`: measured over fitted time of each recorded step, by the corner at or above its rows; empty to leave the
    noise out."""

    corners: list[int]  # rows
    corner_s: list[float]  # the time at each corner
    sampled_s: float
    kv_token_s: float
    pair_s: float
    mean_error: float  # of the fit, as a share
    strays: list[list[float]] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def slower(self, times: float) -> ProfileCost:
        """The costs of a machine that takes so many times as long for everything."""
        return replace(
            self,
            corner_s=[times * one for one in self.corner_s],
            sampled_s=times * self.sampled_s,
            kv_token_s=times * self.kv_token_s,
            pair_s=times * self.pair_s,
        )

    def load_s(self, load: StepLoad) -> float:
        seconds = self.fitted_s(load)
        if not self.strays or not seconds:
            return seconds
        corner = min(bisect.bisect_left(self.corners, load.num_tokens), len(self.corners) - 1)
        return seconds * self.rng.choice(self.strays[corner] or [1.0])

    def fitted_s(self, load: StepLoad) -> float:
        if not load.num_tokens:
            return 0.0
        return (
            self._rows_s(load.num_tokens)
            + self.sampled_s * (load.num_decodes + load.num_prompts)
            + self.kv_token_s * load.num_decode_kv_tokens
            + self.pair_s * load.num_causal_pairs
        )

    def _rows_s(self, num_rows: int) -> float:
        corners, times = self.corners, self.corner_s
        # Beyond the last corner the last piece goes on.
        right = min(max(1, bisect.bisect_left(corners, num_rows)), len(corners) - 1)
        low, high = corners[right - 1], corners[right]
        share = (num_rows - low) / (high - low)
        return times[right - 1] + share * (times[right] - times[right - 1])


@dataclass(slots=True, frozen=True)
class RecordedProfile:
    """Costs, and the engine that they were recorded on."""

    cost: ProfileCost
    settings: dict[str, Any]
    machine: dict[str, Any]


def read_profile(path: str) -> RecordedProfile:
    """Read a file of `quire bench profile`. All of its runs must be of one engine."""
    runs = [run for run in BenchFile.read(path).runs if run.steps]
    if not runs:
        raise ConfigError(f"{path} has no steps: write it with quire bench profile … --output-json {path}")
    settings = [{name: run.settings.get(name) for name in ("model", *_SETTINGS)} for run in runs]
    if any(one != settings[0] for one in settings) or None in settings[0].values():
        raise ConfigError(f"the runs of {path} are not of one engine with one set of settings: record them in one call")
    return RecordedProfile(fit_steps(runs), runs[0].settings, runs[0].machine)


def fit_steps(runs: Sequence[RunReport]) -> ProfileCost:
    import numpy as np

    columns = {name: np.concatenate([np.asarray(run.steps[name]) for run in runs]) for name in runs[0].steps}
    if set(columns) != {"seconds", *STEP_COLUMNS} or len(columns["seconds"]) < _MIN_STEPS:
        num = len(columns.get("seconds", ()))
        raise ConfigError(
            f"the profile has {num} steps and {_MIN_STEPS} are needed: record workloads such as lab16, mixed64 and "
            f"prefill512 in one call"
        )
    seconds = columns["seconds"]
    rows = columns["num_decodes"] + columns["num_prompt_tokens"]
    corners = _corners(rows)
    hats = np.array([np.interp(rows, corners, np.eye(len(corners))[i]) for i in range(len(corners))])
    # A polyline that never falls: each corner adds to the one before.
    steps_up = np.cumsum(hats[::-1], axis=0)[::-1]
    rest = [
        columns["num_decodes"] + columns["num_prompts"],
        columns["num_decode_kv_tokens"],
        columns["num_causal_pairs"],
    ]
    features = np.vstack([steps_up, *rest])
    found = _nonnegative_least_squares(features / seconds, np.ones_like(seconds))
    fitted = found @ features
    scale = float(seconds.sum() / fitted.sum())
    found, fitted = found * scale, fitted * scale
    strays: list[list[float]] = [[] for _ in corners]
    for num_rows, stray in zip(rows.tolist(), (seconds / fitted).tolist(), strict=True):
        strays[bisect.bisect_left(corners, num_rows)].append(stray)
    return ProfileCost(
        corners=corners,
        corner_s=[float(value) for value in np.cumsum(found[: len(corners)])],
        sampled_s=float(found[-3]),
        kv_token_s=float(found[-2]),
        pair_s=float(found[-1]),
        mean_error=float(np.mean(np.abs(seconds / fitted - 1))),
        strays=strays,
    )


def _corners(rows: np.ndarray[Any, Any]) -> list[int]:
    """Powers of two that have steps on both sides: between sizes that were not seen the line is straight."""
    import numpy as np

    largest = 1
    while largest < rows.max() or largest < 2:
        largest *= 2
    found, size = [1], 2
    while size < largest:
        if np.any((rows > size / 2) & (rows <= size)) and np.any((rows >= size) & (rows < 2 * size)):
            found.append(size)
        size *= 2
    return [*found, largest]


def _nonnegative_least_squares(features: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """x >= 0 with the least |x @ features - wanted|, one coordinate after the other. features: [terms, steps]."""
    import numpy as np

    scale = np.sqrt((features**2).sum(axis=1))
    scale[scale == 0] = 1.0
    features = features / scale[:, None]
    gram, target = features @ features.T, features @ wanted
    x = np.zeros(len(gram))
    for _ in range(_ROUNDS):
        for i in range(len(x)):
            if gram[i, i]:
                x[i] = max(0.0, x[i] + (target[i] - gram[i] @ x) / gram[i, i])
    found: np.ndarray[Any, Any] = x / scale
    return found
