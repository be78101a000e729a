"""A checkpoint's quantization_config: 8-bit floats are read, in the two spellings that are in use; the rest is refused
by name."""

from __future__ import annotations

from collections.abc import Mapping

from quire.models.config_reader import ConfigReader, shown
from quire.models.spec import CheckpointFormat

SCALE_SUFFIXES = ("_scale_inv", "_scale")  # after the name of a weight
# What such checkpoints hold beside weights and their scales: activations are scaled by what each row holds, and a cache
# by what the engine measures.
UNUSED_SCALES = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale", ".prob_scale")
_ADVICE = "use a checkpoint in FP8, an unquantized one (quantization='fp8' rounds it when it is loaded), or a GGUF file"


def read_quantization(config: ConfigReader) -> CheckpointFormat | None:
    reader = config.part("quantization_config")
    if reader is None:
        return None
    method = reader.text("quant_method", "quantized")
    if method == "fp8":
        return _read_fp8(reader)
    if method == "compressed-tensors":
        return _read_compressed_tensors(reader)
    raise reader.error(f"{method} weights are not served: {_ADVICE}")


def _read_fp8(reader: ConfigReader) -> CheckpointFormat:
    for key, served in (("fmt", ("e4m3", "float8_e4m3fn")), ("activation_scheme", ("dynamic", "static"))):
        if reader.get(key) is not None and reader.text(key) not in served:
            raise reader.error(f"{key} is {shown(reader.get(key))}: {' and '.join(served)} are served")
    block = _block(reader, "weight_block_size")
    kept = reader.get("modules_to_not_convert") or reader.get("ignored_layers")
    return CheckpointFormat(block, _wide_modules(reader, "modules_to_not_convert", kept))


def _read_compressed_tensors(reader: ConfigReader) -> CheckpointFormat:
    stored = reader.text("format", "float-quantized")
    if stored not in ("float-quantized", "naive-quantized"):
        raise reader.error(f"format {stored!r} is not served: {_ADVICE}")
    groups = reader.part("config_groups")
    if groups is None or not groups.values:
        raise reader.error("config_groups is missing: it says how the weights are stored")
    formats = {_read_group(groups, name) for name in groups.values}
    if len(formats) > 1:
        raise reader.error("config_groups differ in their weights: one format for all of them is served")
    return CheckpointFormat(formats.pop(), _wide_modules(reader, "ignore", reader.get("ignore")))


def _read_group(groups: ConfigReader, name: str) -> tuple[int, int] | None:
    group = groups.part(name)
    weights = None if group is None else group.part("weights")
    if group is None or weights is None:
        raise groups.error(f"{name} says nothing of weights")
    targets = group.get("targets")
    if targets != ["Linear"]:
        raise group.error(f"targets is {shown(targets)}: ['Linear'] is served")
    kind, bits, strategy = weights.text("type", "int"), weights.integer("num_bits"), weights.text("strategy", "tensor")
    if (kind, bits) != ("float", 8):
        raise weights.error(f"{kind} of {bits} bits is not served: {_ADVICE}")
    if strategy not in ("tensor", "channel", "block"):
        raise weights.error(f"strategy {strategy!r} is not served: tensor, channel and block are")
    return _block(weights, "block_structure") if strategy == "block" else None


def _block(reader: ConfigReader, key: str) -> tuple[int, int] | None:
    value = reader.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and 0 < n < 2**20 for n in value):
        raise reader.error(f"{key} is {shown(value)}: expected two whole numbers, such as [128, 128]")
    return value[0], value[1]


def _wide_modules(reader: ConfigReader, key: str, names: object) -> tuple[str, ...]:
    """Of the modules that stay unquantized, those that could be quantized: no vocabulary, no norm."""
    if names is None:
        return ()
    if isinstance(names, Mapping | str) or not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise reader.error(f"{key} is {shown(names)}: expected a list of names")
    harmless = ("lm_head", "embed_tokens", "norm", "mlp.gate", "shared_expert_gate")
    return tuple(name for name in names if not name.removesuffix("$").endswith(harmless))
