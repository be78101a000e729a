"""Adapters as PEFT saves them: adapter_config.json, and adapter_model.safetensors with two thin matrices a module."""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import WeightsError
from quire.kernels.adapters import LowRankPair
from quire.models.stored_names import StoredNames
from quire.weights.files import read_json_object
from quire.weights.hub import fetch_adapter
from quire.weights.open import is_hub_id
from quire.weights.safetensors_checkpoint import read_header

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
_DTYPES = ("F64", "F32", "F16", "BF16")

# Fields of adapter_config.json that change more than two thin matrices beside each: what they ask for.
_REFUSED = {
    "use_dora": "DoRA, which also scales the matrices' rows",
    "modules_to_save": "whole matrices of its own (modules_to_save)",
    "lora_bias": "a bias beside the matrices (lora_bias)",
    "trainable_token_indices": "words of its own (trainable_token_indices)",
    "layer_replication": "layers that are there several times (layer_replication)",
    "target_parameters": "parameters of experts (target_parameters)",
    "alora_invocation_tokens": "a part of the prompt without it (activated LoRA)",
    "use_qalora": "QALoRA's grouped inputs",
    "megatron_config": "Megatron's layers",
}
# Ways to begin the training that also change the model itself; saved so, an adapter fits the changed one.
_CHANGES_THE_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(slots=True, frozen=True)
class PeftAdapter:
    """An adapter that fits the model."""

    digest: str  # of its files
    pairs: Mapping[str, LowRankPair]  # by module, as the decoder has them
    rank: int  # the largest
    num_bytes: int


def find_adapter(path: str) -> Path:
    """The folder of an adapter; one that is named as on the hub is fetched."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or not is_hub_id(path):
        raise WeightsError(f"{path}: no such folder: give the one that holds {CONFIG_NAME}, or a hub id (owner/name)")
    return fetch_adapter(path, [CONFIG_NAME, WEIGHTS_NAME])


def file_marks(folder: Path) -> list[tuple[int, ...]]:
    """Marks that differ once an adapter's files have changed."""
    found: list[tuple[int, ...]] = []
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        with contextlib.suppress(OSError):  # read_adapter says what is wrong
            status = (folder / name).stat()
            found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    return found


def read_adapter(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], names: StoredNames, head_dim: int, max_rank: int
) -> PeftAdapter:
    """shapes: of the matrices that adapters may change, by module; names: how the model's files name them. WeightsError
    for one that is broken, asks for what is not served, or does not fit the model."""
    from safetensors import SafetensorError, safe_open

    file, config_file = folder / WEIGHTS_NAME, folder / CONFIG_NAME
    if not config_file.is_file():
        raise WeightsError(f"{folder}: holds no {CONFIG_NAME}: it is no adapter that PEFT has saved")
    config = read_json_object(config_file)
    _check_config(config, config_file)
    if not file.is_file():
        why = "only as a PyTorch pickle, which can run code when read" if any(folder.glob("*.bin")) else "not there"
        raise WeightsError(f"{folder}: its weights are {why}: save it with safe_serialization=True")
    sides: dict[str, dict[str, str]] = {}  # by module, the names of its tensors
    for entry in read_header(file):
        found = _TENSOR.fullmatch(entry.stored_name)
        if found is None:
            raise WeightsError(f"{file}: {_about_tensor(entry.stored_name)}")
        if entry.dtype not in _DTYPES or len(entry.shape) != 2:
            raise WeightsError(
                f"{file}: tensor {entry.stored_name} has the shape {list(entry.shape)} in {entry.dtype}: expected a "
                f"matrix in {', '.join(_DTYPES)}"
            )
        sides.setdefault(found["module"], {})[found["side"]] = entry.stored_name
    if not sides:
        raise WeightsError(f"{file}: holds no tensors")
    pairs: dict[str, LowRankPair] = {}
    weights = {f"{name}.weight": shape for name, shape in shapes.items()}
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for stored, both in sides.items():
                if len(both) < 2:
                    lacks = "B" if "A" in both else "A"
                    raise WeightsError(f"{file}: {stored} has no lora_{lacks}.weight: fetch it again")
                a, b = (opened.get_tensor(both[side]) for side in "AB")
                module = stored.removeprefix(_PREFIX)
                scale = _scale(config, module, len(a), config_file)
                if len(a) > max_rank:
                    raise WeightsError(
                        f"{file}: {both['A']} has rank {len(a)}, and max_lora_rank is {max_rank}: raise it"
                    )
                for name, part in _parts(module, a, b, weights, names, head_dim, file, both).items():
                    pairs[name] = LowRankPair(a, part, scale)
    except SafetensorError as error:
        raise WeightsError(f"{file}: the library cannot read it ({error}): fetch it again") from error
    digest = hashlib.sha256(config_file.read_bytes())
    with file.open("rb") as content:
        digest.update(hashlib.file_digest(content, "sha256").digest())
    largest = max(len(pair.a) for pair in pairs.values())
    return PeftAdapter(digest.hexdigest()[:16], pairs, largest, file.stat().st_size)


def _parts(
    module: str,
    a: Any,
    b: Any,
    weights: Mapping[str, tuple[int, ...]],
    names: StoredNames,
    head_dim: int,
    file: Path,
    stored: Mapping[str, str],
) -> dict[str, Any]:
    """The rows of B by the decoder's modules: several where the model's files have these in one matrix.

    weights: shapes of the tensors that adapters may change."""
    whole = (b.shape[0], a.shape[1])
    # A family that stores matrices as [inputs, outputs] has the adapter's beside them as everybody does.
    is_turned = names.is_transposed(f"{module}.weight")
    found = {}
    for part in names.parts(f"{module}.weight", whole[::-1] if is_turned else whole, weights, head_dim):
        name = part.name.removesuffix(".weight")
        if part.name not in weights:
            raise WeightsError(
                f"{file}: {stored['A']} changes {module}, of which this model has none that adapters can change: "
                f"they can change {', '.join(_kinds(weights))}"
            )
        rows = b if part.view is None else part.view(b.T if is_turned else b)
        if (rows.shape[0], a.shape[1]) != weights[part.name] or a.shape[0] != b.shape[1]:
            raise WeightsError(
                f"{file}: {stored['A']} of shape {list(a.shape)} and {stored['B']} of shape {list(b.shape)} do not fit "
                f"{name}, which is {list(weights[part.name])}: is it an adapter of another model?"
            )
        found[name] = rows
    return found


def _kinds(weights: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.split(".")[-2] for name in weights))


def _check_config(config: Mapping[str, Any], file: Path) -> None:
    if config.get("peft_type") != "LORA":
        raise WeightsError(f"{file}: peft_type is {config.get('peft_type')!r}, and LORA is served")
    for name, what in _REFUSED.items():
        if config.get(name):
            raise WeightsError(f"{file}: the adapter has {what}, which is not served: merge it into the model")
    if config.get("bias", "none") != "none":
        raise WeightsError(f"{file}: the adapter has biases (bias={config['bias']!r}), which are not served: train "
                           "it with bias='none', or merge it into the model")  # fmt: skip
    begun = str(config.get("init_lora_weights", True))
    if begun.lower().startswith(_CHANGES_THE_MODEL):
        raise WeightsError(
            f"{file}: the adapter began with {begun}, which changed the model too: save it as a plain one "
            "(path_initial_model_for_weight_conversion)"
        )


def _about_tensor(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return f"tensor {name} is DoRA's, which is not served: merge it into the model"
    if "lora_embedding" in name:
        return f"tensor {name} changes the embedding, which adapters cannot: leave it out of target_modules"
    return f"tensor {name} is neither a lora_A.weight nor a lora_B.weight: only those are served"


def _scale(config: Mapping[str, Any], module: str, rank: int, file: Path) -> float:
    """What B A is multiplied by: alpha / rank, or with rsLoRA alpha / sqrt(rank)."""
    alpha = _for_module(config.get("alpha_pattern"), module, config.get("lora_alpha", 8))
    stated = _for_module(config.get("rank_pattern"), module, config.get("r", 8))
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise WeightsError(f"{file}: lora_alpha must be a number, got {alpha!r}")
    if stated != rank:
        raise WeightsError(f"{file}: the rank of {module} is {stated!r} there and {rank} in {WEIGHTS_NAME}")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _for_module(pattern: Any, module: str, default: Any) -> Any:
    """A pattern's value for a module: that of the first key that its name ends with, as PEFT reads it."""
    for key, value in (pattern or {}).items() if isinstance(pattern, Mapping) else ():
        if re.fullmatch(rf"(.*\.)?({key})", module):
            return value
    return default
