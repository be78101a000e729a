"""Whether a model generates or pools, and how it pools: by its config, by files beside it, and by what is asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ConfigError
from quire.models.config_reader import ConfigReader, shown
from quire.models.spec import ModelSpec, PoolerSpec
from quire.pooling import PoolerConfig, PoolingKind

_MAX_LABELS = 65_536


def is_classifier(architecture: str) -> bool:
    return architecture.endswith("ForSequenceClassification")


def choose_pooler(
    spec: ModelSpec,
    config: Mapping[str, Any],
    *,
    source: str,
    runner: str = "auto",
    convert: str = "auto",
    given: PoolerConfig | None = None,
    told: tuple[PoolingKind, bool] | None = None,
) -> PoolerSpec | None:
    """None: the model generates.

    told: the pooling that files beside the config tell, and whether embeddings are normalized after it.
    """
    name = spec.architecture
    if spec.is_encoder and runner == "generate":
        raise ConfigError(f"{name} is an encoder and generates no text: leave runner out, and use LLM.embed or .score")
    is_base = is_classifier(name) or (name.endswith("Model") and not name.endswith("LMHeadModel"))
    if runner == "generate" and is_base:
        raise ConfigError(
            f"{name} has no head that gives tokens, and runner='generate' was asked for: leave runner out to pool, or "
            "use the model that was made for text"
        )
    pools = runner == "pooling" or (runner == "auto" and (spec.is_encoder or is_base or told is not None))
    if not pools:
        for option, value in (("convert", None if convert in ("auto", "none") else convert), ("pooler_config", given)):
            if value is not None:
                raise ConfigError(f"{option} is for models that pool, and {name} generates: set runner='pooling'")
        return None
    reader = ConfigReader(config, source)
    given = given or PoolerConfig()
    if convert == "classify" and not is_classifier(name):
        raise ConfigError(f"{name} has no classifier: use a model of the kind ...ForSequenceClassification")
    if is_classifier(name) and convert in ("auto", "none", "classify"):
        return _classifier(reader, spec, given)
    kind, normalizes = told or (PoolingKind.CLS if spec.is_encoder else PoolingKind.LAST, True)
    return PoolerSpec(
        kind=given.pooling_type or kind,
        normalizes=normalizes if given.use_activation is None else given.use_activation,
        dimensions=_dimensions(reader),
    )


def _classifier(reader: ConfigReader, spec: ModelSpec, given: PoolerConfig) -> PoolerSpec:
    labels = _labels(reader)
    activation = _activation(reader, len(labels))
    return PoolerSpec(
        kind=given.pooling_type or (PoolingKind.CLS if spec.is_encoder else PoolingKind.LAST),
        labels=labels,
        has_dense=spec.is_encoder,
        has_bias=spec.is_encoder,
        activation="identity" if given.use_activation is False else activation,
    )


def _labels(reader: ConfigReader) -> tuple[str, ...]:
    """A config without labels has two, as transformers has it."""
    named = reader.get("id2label")
    if named is None:
        count = reader.integer("num_labels", 2, at_most=_MAX_LABELS)
        return tuple(f"LABEL_{i}" for i in range(count))
    if not isinstance(named, Mapping) or not 0 < len(named) <= _MAX_LABELS:
        raise reader.error(f"id2label is {shown(named)}: expected an object of labels")
    by_id = {str(number): str(label) for number, label in named.items()}
    if set(by_id) != {str(i) for i in range(len(by_id))}:
        raise reader.error("id2label must have the labels 0, 1, 2 and so on, with no gap")
    return tuple(by_id[str(i)] for i in range(len(by_id)))


def _activation(reader: ConfigReader, num_labels: int) -> str:
    """sentence-transformers' own key first, then what transformers says of the labels."""
    part = reader.part("sentence_transformers")
    named = (part.get("activation_fn") if part else None) or reader.get("sbert_ce_default_activation_function")
    if named is not None:
        activation = str(named).rpartition(".")[2].lower()
        if activation not in ("identity", "sigmoid", "softmax"):
            raise reader.error(f"activation_fn {shown(named)} is not served (there are Identity, Sigmoid and Softmax)")
        return activation
    by_problem = {
        "regression": "identity",
        "multi_label_classification": "sigmoid",
        "single_label_classification": "softmax",
    }
    return by_problem.get(str(reader.get("problem_type")), "sigmoid" if num_labels == 1 else "softmax")


def _dimensions(reader: ConfigReader) -> tuple[int, ...] | None:
    listed = reader.get("matryoshka_dimensions")
    if listed is None:
        return () if reader.flag("is_matryoshka", False) else None
    if not isinstance(listed, list | tuple) or not listed or not all(type(n) is int and n > 0 for n in listed):
        raise reader.error(f"matryoshka_dimensions is {shown(listed)}: expected a list of numbers")
    return tuple(sorted(listed))
