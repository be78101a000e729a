from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from quire.cli.settings_file import Flag, Gathered, gather, read_count, read_json, read_number, read_yaml
from quire.errors import ConfigError

FLAGS = [
    Flag(name="port", help="port", read=read_count),
    Flag(name="dtype"),
    Flag(name="drain_timeout", read=read_number),
    Flag(name="swap_space_gb", read=read_number, aliases=("--swap-space",)),
    Flag(name="api_key", is_list=True, is_secret=True, is_guard=True),
    Flag(name="api_key_file", is_guard=True),
    Flag(name="served_model_name", is_list=True, takes_several=True),
    Flag(name="enforce_eager", is_switch=True),
    Flag(name="hf_overrides", read=read_json),
]


def take(
    *arguments: str, environ: dict[str, str] | None = None, file: str | None = None, tmp_path: Path | None = None
) -> Gathered:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    group = parser.add_argument_group()
    for flag in FLAGS:
        flag.add_to(group)
    given = list(arguments)
    if file is not None:
        assert tmp_path is not None
        (tmp_path / "quire.yaml").write_text(file)
        given += ["--config", str(tmp_path / "quire.yaml")]
    return gather(FLAGS, parser.parse_args(given), environ or {})


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = "port: 1\ndtype: float16\nenforce-eager: true\n"
    found = take("--port", "3", environ={"QUIRE_PORT": "2", "QUIRE_DTYPE": "bfloat16"}, file=file, tmp_path=tmp_path)
    assert found.values == {"port": 3, "dtype": "bfloat16", "enforce_eager": True}
    assert found.sources["port"] == "--port"
    assert found.sources["dtype"] == "QUIRE_DTYPE"
    assert "enforce-eager in" in found.sources["enforce_eager"]
    assert take("--no-enforce-eager", environ={"QUIRE_ENFORCE_EAGER": "yes"}).values == {"enforce_eager": False}


def test_what_is_given_nowhere_is_not_there() -> None:
    assert take().values == {}


@pytest.mark.parametrize(
    ("arguments", "variable", "yaml", "value"),
    [
        (["--port", "8K"], {"QUIRE_PORT": "8K"}, "port: 8192", 8192),
        (["--drain-timeout", "1.5"], {"QUIRE_DRAIN_TIMEOUT": "1.5"}, "drain_timeout: 1.5", 1.5),
        (["--swap-space", "2"], {"QUIRE_SWAP_SPACE": "2"}, "swap-space: 2", 2.0),
        (["--api-key", "a,b", "--api-key", "c"], {"QUIRE_API_KEY": "a,b c"}, "api-key: ['a,b', c]", ["a,b", "c"]),
        (
            ["--served-model-name", "a", "b"],
            {"QUIRE_SERVED_MODEL_NAME": "a b"},
            "served-model-name: [a, b]",
            ["a", "b"],
        ),
        (["--enforce-eager"], {"QUIRE_ENFORCE_EAGER": "1"}, "enforce_eager: on", True),
        (["--hf-overrides", '{"a": 1}'], {"QUIRE_HF_OVERRIDES": '{"a": 1}'}, "hf-overrides: {a: 1}", {"a": 1}),
    ],
)
def test_a_value_reads_the_same_in_all_three_places(
    arguments: list[str], variable: dict[str, str], yaml: str, value: Any, tmp_path: Path
) -> None:
    for found in (take(*arguments), take(environ=variable), take(file=yaml, tmp_path=tmp_path)):
        assert list(found.values.values()) == [value]
        assert found.warnings == []


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("prot: 1", "prot in .* is no flag of quire serve: did you mean port"),
        ("port: many", "port in .* must be a whole number, like 4096 or 4K, got 'many'"),
        ("port: [1, 2]", "must be one value"),
        ("dtype: yes", "put text in quotes"),
        ("enforce_eager: 1", "must be true or false"),
        ("port: 1\nport: 2", "given twice"),
        ("swap-space: 1\nswap-space-gb: 2", "given twice"),
        ("drain-timeout: 1\ndrain_timeout: 2", "given twice"),
        ("- port", "must hold lines like"),
        ("port: [", "not valid YAML, line"),
        ("!!python/object/apply:os.getcwd []", "not valid YAML"),
        ("<<: 5", "not valid YAML, line 1: expected a mapping"),
        ("<<: {port: 1}\n<<: {port: 2}", "<< in .* is given twice"),
        ("dtype: 2024-13-45", "a value is not what it looks like: put text in quotes"),
        ("dtype: a\x07b", "not valid YAML"),
        ("api-key: 0123", "api.key in .* must be text: put it in quotes"),
    ],
)
def test_a_files_mistake_is_one_line_that_names_it(file: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        take(file=file, tmp_path=tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "file",
    [
        "api-key: {name: team, key: SECRET}",
        "api-key: [[SECRET]]",
        "api-key: *SECRET",
        "api-key: !SECRET x",
        "api-key: !!int SECRET",
    ],
)
def test_no_mistake_shows_a_secret(file: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        take(file=file, tmp_path=tmp_path)
    assert "SECRET" not in str(refused.value)


def test_a_merged_mapping_gives_what_the_file_itself_does_not(tmp_path: Path) -> None:
    assert take(file="port: 5\n<<: {port: 1, dtype: half}", tmp_path=tmp_path).values == {"port": 5, "dtype": "half"}
    # An anchor of which another takes over a part, and then a third: each key is written once.
    file = "hf-overrides: {a: &a {x: 1, y: 1}, b: &b {<<: *a, x: 2}, c: {<<: *b, y: 3}}"
    nested = take(file=file, tmp_path=tmp_path).values["hf_overrides"]
    assert nested == {"a": {"x": 1, "y": 1}, "b": {"x": 2, "y": 1}, "c": {"x": 2, "y": 3}}


def test_an_empty_file_and_null_give_nothing_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    assert take(file="", tmp_path=tmp_path).values == {}
    assert take(file="port: null\n", tmp_path=tmp_path).values == {}
    with pytest.raises(ConfigError, match="No such file"):
        read_yaml(str(tmp_path / "none.yaml"))


def test_the_file_can_be_named_by_a_variable(tmp_path: Path) -> None:
    (tmp_path / "q.yaml").write_text("port: 5")
    assert take(environ={"QUIRE_CONFIG": str(tmp_path / "q.yaml")}).values == {"port": 5}


def test_variables_of_no_flag_are_warned_about() -> None:
    found = take(environ={"QUIRE_PROT": "1", "QUIRE_HOME": "/x", "QUIRE_CPU_ISA": "avx2", "PATH": "/bin"})
    assert found.warnings == ["QUIRE_PROT is set, but no flag has that name: did you mean QUIRE_PORT?"]


def test_what_kubernetes_sets_beside_a_service_named_quire_is_no_port() -> None:
    links = {"QUIRE_PORT": "tcp://10.0.0.1:80", "QUIRE_SERVICE_HOST": "10.0.0.1", "QUIRE_PORT_80_TCP": "x"}
    found = take(environ=links)
    assert found.values == {}
    assert len(found.warnings) == 1
    assert "enableServiceLinks" in found.warnings[0]


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"QUIRE_PORT": "x"}, "QUIRE_PORT must be a whole number"),
        ({"QUIRE_ENFORCE_EAGER": "maybe"}, "QUIRE_ENFORCE_EAGER must be true or false"),
        ({"QUIRE_API_KEY": ""}, "QUIRE_API_KEY is given but empty"),
        ({"QUIRE_HF_OVERRIDES": "{"}, "QUIRE_HF_OVERRIDES must be JSON"),
    ],
)
def test_a_variables_mistake_names_it(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        take(environ=environ)


@pytest.mark.parametrize(
    ("arguments", "environ", "file"),
    [
        ([], {"QUIRE_API_KEY_FILE": ""}, None),
        ([], {"QUIRE_API_KEY_FILE": " "}, None),
        ([], {"QUIRE_API_KEY": " "}, None),
        ([], {"QUIRE_CONFIG": ""}, None),
        (["--config", ""], {}, None),
        (["--api-key-file", ""], {}, None),
        (["--api-key", ""], {}, None),
        ([], {}, "api-key:"),
        ([], {}, "api-key: ~"),
        ([], {}, "api-key: []"),
        ([], {}, "api-key: ['']"),
        ([], {}, "api-key-file:"),
        ([], {}, "api-key-file: ''"),
        ([], {}, "api_key_file: []"),
    ],
)
def test_a_guard_that_is_given_but_empty_is_refused(
    arguments: list[str], environ: dict[str, str], file: str | None, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="is given but empty: leave it out, or give it a value"):
        take(*arguments, environ=environ, file=file, tmp_path=tmp_path)


def test_an_empty_variable_is_as_if_it_were_not_set() -> None:
    assert take(environ={"QUIRE_PORT": " "}).values == {}


@pytest.mark.parametrize(
    ("text", "value"), [("7", 7), ("-1", -1), ("2k", 2000), ("2K", 2048), ("3M", 3 << 20), ("1g", 10**9)]
)
def test_counts(text: str, value: int) -> None:
    assert read_count(text) == value
