"""A checkpoint's quantization_config: 8-bit floats and whole numbers of 4 and 8 bits are read, in the spellings that
are in use; the rest is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.models.config_reader import ConfigReader, shown
from quire.models.spec import CheckpointFormat, IntegerFormat

SCALE_SUFFIXES = ("_scale_inv", "_scale")  # after the name of a weight
# What such checkpoints hold beside weights and their scales: activations are scaled by what each row holds.
KV_SCALES = (".k_scale", ".v_scale", ".kv_scale")  # which a cache in 8 bits uses
UNUSED_SCALES = (".input_scale", ".output_scale", ".q_scale", ".prob_scale")
_ADVICE = "use a checkpoint in FP8, AWQ, GPTQ or compressed-tensors' int4 or int8, an unquantized one, or a GGUF file"


def read_quantization(config: ConfigReader) -> CheckpointFormat | IntegerFormat | None:
    reader = config.part("quantization_config")
    if reader is None:
        return None
    method = reader.text("quant_method", "quantized")
    readers: dict[str, Callable[[ConfigReader], CheckpointFormat | IntegerFormat | None]] = {
        "fp8": _read_fp8,
        "awq": _read_awq,
        "gptq": _read_gptq,
        "compressed-tensors": _read_compressed_tensors,
    }
    if method == "mxfp4" and config.get("model_type") == "gpt_oss":
        return None  # its experts: the loader knows them by their names
    if method not in readers:
        raise reader.error(f"{method} weights are not served: {_ADVICE}")
    return readers[method](reader)


def _read_fp8(reader: ConfigReader) -> CheckpointFormat:
    for key, served in (("fmt", ("e4m3", "float8_e4m3fn")), ("activation_scheme", ("dynamic", "static"))):
        if reader.get(key) is not None and reader.text(key) not in served:
            raise reader.error(f"{key} is {shown(reader.get(key))}: {' and '.join(served)} are served")
    block = _block(reader, "weight_block_size")
    kept = reader.get("modules_to_not_convert") or reader.get("ignored_layers")
    return CheckpointFormat(block, _wide_modules(reader, "modules_to_not_convert", kept))


def _read_awq(reader: ConfigReader) -> IntegerFormat:
    _only(reader, "bits", 4)
    _only(reader, "version", "gemm", "GEMM")
    _only(reader, "zero_point", True)
    kept = _wide_modules(reader, "modules_to_not_convert", reader.get("modules_to_not_convert"))
    return IntegerFormat(layout="awq", bits=4, group=_group(reader), has_zeros=True, wide_modules=kept)


def _read_gptq(reader: ConfigReader) -> IntegerFormat:
    _only(reader, "bits", 4, 8)
    _only(reader, "checkpoint_format", "gptq", "gptq_v2")
    _only(reader, "is_marlin_format", False)
    _only(reader, "pack_dtype", "int32")
    _only(reader, "dynamic", {})  # bits of single modules
    return IntegerFormat(
        layout="gptq",
        bits=reader.integer("bits"),
        group=_group(reader),
        has_zeros=True,
        is_symmetric=reader.flag("sym", True),
        zero_offset=1 if reader.text("checkpoint_format", "gptq") == "gptq" else 0,  # the first version stores one less
        has_order=reader.flag("desc_act", False),
    )


def _read_compressed_tensors(reader: ConfigReader) -> CheckpointFormat | IntegerFormat | None:
    if reader.get("kv_cache_scheme") is not None and not reader.get("config_groups"):
        return None  # it has scales for an 8-bit KV cache and nothing else
    stored = reader.text("format", "float-quantized")
    if stored not in ("float-quantized", "naive-quantized", "pack-quantized", "int-quantized"):
        raise reader.error(f"format {stored!r} is not served: {_ADVICE}")
    for key in ("sparsity_config", "transform_config"):
        if reader.get(key):
            raise reader.error(f"{key} is {shown(reader.get(key))}: such weights are not served")
    groups = reader.part("config_groups")
    if groups is None or not groups.values:
        raise reader.error("config_groups is missing: it says how the weights are stored")
    kept = _wide_modules(reader, "ignore", reader.get("ignore"))
    formats = {_read_group(groups, name, stored, kept) for name in groups.values}
    if len(formats) > 1:
        raise reader.error("config_groups differ in their weights: one format for all of them is served")
    return formats.pop()


def _read_group(
    groups: ConfigReader, name: str, stored: str, kept: tuple[str, ...]
) -> CheckpointFormat | IntegerFormat:
    group = groups.part(name)
    weights = None if group is None else group.part("weights")
    if group is None or weights is None:
        raise groups.error(f"{name} says nothing of weights")
    targets = group.get("targets")
    if targets != ["Linear"]:
        raise group.error(f"targets is {shown(targets)}: ['Linear'] is served")
    kind, bits, strategy = weights.text("type", "int"), weights.integer("num_bits"), weights.text("strategy", "tensor")
    if stored in ("pack-quantized", "int-quantized"):
        return _read_integers(group, weights, stored, kept)
    if (kind, bits) != ("float", 8):
        raise weights.error(f"{kind} of {bits} bits is not served: {_ADVICE}")
    if strategy not in ("tensor", "channel", "block"):
        raise weights.error(f"strategy {strategy!r} is not served: tensor, channel and block are")
    return CheckpointFormat(_block(weights, "block_structure") if strategy == "block" else None, kept)


def _read_integers(group: ConfigReader, weights: ConfigReader, stored: str, kept: tuple[str, ...]) -> IntegerFormat:
    is_packed = stored == "pack-quantized"
    _only(weights, "type", "int")
    _only(weights, "num_bits", *((4, 8) if is_packed else (8,)))
    _only(weights, "strategy", *(("group", "channel") if is_packed else ("channel",)))
    _only(weights, "symmetric", *((True, False) if is_packed else (True,)))
    _only(weights, "actorder", None, *(("weight", "static", "group", "dynamic") if is_packed else ()))
    inputs = group.part("input_activations")
    if inputs is not None:
        if is_packed:
            raise group.error("input_activations are rounded too: with format 'pack-quantized' that is not served")
        _only(inputs, "type", "int")
        _only(inputs, "num_bits", 8)
        _only(inputs, "strategy", "token")
        _only(inputs, "symmetric", True)
        if not inputs.flag("dynamic", False):
            raise inputs.error("dynamic is false: scales of a row's own numbers are served, not ones measured before")
    return IntegerFormat(
        layout=stored,
        bits=weights.integer("num_bits"),
        group=weights.integer("group_size") if weights.text("strategy") == "group" else None,
        has_zeros=not weights.flag("symmetric", True),
        has_order=weights.get("actorder") in ("group", "dynamic"),
        rounds_inputs=inputs is not None,
        wide_modules=kept,
    )


def _only(reader: ConfigReader, key: str, *served: object) -> None:
    """Refuse another value. One that is not given counts as the first."""
    value = reader.get(key)
    if value is not None and value not in served:
        told = ", ".join(shown(value) for value in served if value is not None) or "none"
        raise reader.error(f"{key} is {shown(value)}, served: {told}")


def _group(reader: ConfigReader) -> int | None:
    """How many inputs share a scale in AWQ and GPTQ; None (-1 in the file) where a whole row does."""
    return None if reader.get("group_size") == -1 else reader.integer("group_size", 128)


def _block(reader: ConfigReader, key: str) -> tuple[int, int] | None:
    value = reader.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and 0 < n < 2**20 for n in value):
        raise reader.error(f"{key} is {shown(value)}: expected two whole numbers, such as [128, 128]")
    return value[0], value[1]


def _wide_modules(reader: ConfigReader, key: str, names: object) -> tuple[str, ...]:
    """The modules that stay unquantized and could be quantized: no vocabulary, no norm."""
    if names is None:
        return ()
    if isinstance(names, Mapping | str) or not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise reader.error(f"{key} is {shown(names)}: expected a list of names")
    harmless = ("lm_head", "embed_tokens", "norm", "mlp.gate", "shared_expert_gate")
    return tuple(name for name in names if not name.removesuffix("$").endswith(harmless))
