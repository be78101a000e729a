from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import fakes
import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from weights import fake_hub

from quire.cli.main import main
from quire.errors import DownloadError
from quire.weights.hub import choose_gguf, fetch_from_hub


@pytest.fixture
def snapshot(tmp_path):
    directory = tmp_path / "snapshot"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"")
    return directory


@pytest.fixture
def hub(monkeypatch, snapshot):
    """Stands in for snapshot_download: remembers the call; raises `hub.error` if set."""

    class Hub:
        error: Exception | None = None
        repo: str
        options: dict

        def __call__(self, repo, **options):
            self.repo, self.options = repo, options
            if self.error is not None:
                raise self.error
            return str(snapshot)

    stand_in = Hub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stand_in)
    monkeypatch.setattr("quire.weights.hub._hub_failure", lambda: None)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return stand_in


def wanted(options, files):
    from huggingface_hub.utils import filter_repo_objects

    patterns = {key: options[key] for key in ("allow_patterns", "ignore_patterns")}
    return set(filter_repo_objects(files, **patterns))


FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "chat_template.jinja",
    "merges.txt",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "consolidated.safetensors",
    "original/consolidated.00.pth",
    "original/params.json",
    "onnx/model.safetensors",
    "pytorch_model.bin",
    "modeling_evil.py",
    "README.md",
]


def test_fetches_what_is_needed_and_nothing_that_runs(hub, snapshot):
    assert fetch_from_hub("owner/name", revision="v1", cache_dir=Path("/d")) == snapshot
    assert (hub.repo, hub.options["revision"], hub.options["cache_dir"]) == ("owner/name", "v1", Path("/d"))
    assert wanted(hub.options, FILES) == set(FILES[:8])


def test_config_only(hub, snapshot):
    (snapshot / "model.safetensors").unlink()
    assert fetch_from_hub("owner/name", config_only=True) == snapshot
    assert wanted(hub.options, FILES) == set(FILES[:6]) | {"model.safetensors.index.json"}


def test_repositories_without_what_quire_reads(hub, snapshot, monkeypatch):
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, repo, revision: ["pytorch_model.bin"])
    (snapshot / "config.json").unlink()
    with pytest.raises(DownloadError, match=r"owner/name has no config.json"):
        fetch_from_hub("owner/name")
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(DownloadError, match="owner/name has neither safetensors nor GGUF files"):
        fetch_from_hub("owner/name")


def http_error(kind, status=404):
    # What the errors look at; which HTTP client makes the real one depends on the library's version.
    response = SimpleNamespace(status_code=status, headers={}, request=None, text="")
    return kind("from the hub", response=response)


def unreachable() -> Exception:
    error = errors.LocalEntryNotFoundError("pass 'local_files_only=False' as input")
    error.__context__ = OSError("no such host")
    return error


@pytest.mark.parametrize(
    ("make", "environment", "says"),
    [
        (lambda: http_error(errors.GatedRepoError, 403), {}, "is gated: ask for access.*set HF_TOKEN"),
        (lambda: http_error(errors.GatedRepoError, 403), {"HF_TOKEN": "x"}, "is gated: HF_TOKEN's account"),
        (lambda: http_error(errors.RepositoryNotFoundError), {}, "check the spelling, and set HF_TOKEN"),
        (lambda: http_error(errors.RepositoryNotFoundError), {"HF_TOKEN": "x"}, "check the spelling$"),
        (lambda: http_error(errors.RevisionNotFoundError), {}, "at revision 'v9' does not exist"),
        (lambda: errors.LocalEntryNotFoundError("x"), {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        (lambda: errors.LocalEntryNotFoundError("x"), {}, "the hub cannot be reached: check the network"),
        (unreachable, {}, r"or give a path \(no such host\)$"),
        (lambda: errors.HFValidationError("bad id"), {}, "cannot be fetched: bad id"),
        (lambda: http_error(errors.HfHubHTTPError, 500), {}, "could not be fetched: from the hub"),
        (lambda: OSError("proxy\nand more"), {}, "could not be fetched: proxy: check the network"),
    ],
)
def test_errors_say_what_to_do(hub, monkeypatch, make, environment, says):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    hub.error = make()
    with pytest.raises(DownloadError, match=says) as caught:
        fetch_from_hub("owner/name", revision="v9")
    assert "owner/name" in str(caught.value)
    assert caught.value.__cause__ is hub.error


NOT_THERE = [
    (lambda: http_error(errors.RepositoryNotFoundError), "the hub has none either"),
    (lambda: errors.LocalEntryNotFoundError("x"), "the hub could not be asked"),
    (lambda: OSError("proxy"), "the hub could not be asked"),
    (lambda: errors.HFValidationError("bad id"), "the hub could not be asked"),
]


@pytest.mark.parametrize(("make", "says"), NOT_THERE)
def test_a_name_without_an_owner_is_no_fault_of_the_network(hub, make, says):
    hub.error = make()
    with pytest.raises(DownloadError, match=r"no file, folder or alias is called 'nope'") as caught:
        fetch_from_hub("nope")
    assert says in str(caught.value)
    assert "`quire models` lists them" in str(caught.value) and "owner/name" in str(caught.value)
    assert "network" not in str(caught.value) and "did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", ["SmolLM-2", "smolm2"])
@pytest.mark.parametrize("make", [make for make, _ in NOT_THERE])
def test_a_misspelled_alias_is_guessed(hub, name, make):
    hub.error = make()
    with pytest.raises(DownloadError, match="did you mean the alias 'smollm2'"):
        fetch_from_hub(name)


def test_an_old_id_without_an_owner_is_still_fetched(hub, snapshot):
    assert fetch_from_hub("gpt2") == snapshot
    hub.error = http_error(errors.GatedRepoError, 403)
    with pytest.raises(DownloadError, match="is gated"):
        fetch_from_hub("gpt2")


def test_bars_of_the_library_are_off_in_a_pipe_and_on_again_after(hub, monkeypatch):
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled

    before = are_progress_bars_disabled()
    seen = []
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    call = type(hub).__call__
    monkeypatch.setattr(
        type(hub), "__call__", lambda *a, **k: seen.append(are_progress_bars_disabled()) or call(*a, **k)
    )
    fetch_from_hub("owner/name")
    assert seen == [True]
    assert are_progress_bars_disabled() == before


QWEN = [f"qwen2.5-0.5b-instruct-{q}.gguf" for q in ("fp16", "q2_k", "q4_0", "q4_k_m", "q8_0")]
BARTOWSKI = [
    "README.md",
    "Llama-3.2-1B-Instruct-IQ4_XS.gguf",
    "Llama-3.2-1B-Instruct-Q4_K_L.gguf",
    "Llama-3.2-1B-Instruct-Q4_K_M.gguf",
    "Llama-3.2-1B-Instruct-Q8_0.gguf",
    "mmproj-Q4_K_M.gguf",
    "imatrix.gguf",
    "BF16/Llama-3.2-1B-Instruct-BF16-00001-of-00002.gguf",
    "BF16/Llama-3.2-1B-Instruct-BF16-00002-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("names", "wanted", "chosen"),
    [
        (QWEN, "Q4_K_M", "qwen2.5-0.5b-instruct-q4_k_m.gguf"),
        (QWEN, "q8_0", "qwen2.5-0.5b-instruct-q8_0.gguf"),
        (QWEN, None, "qwen2.5-0.5b-instruct-q4_k_m.gguf"),
        (QWEN, "qwen2.5-0.5b-instruct-q2_k.gguf", "qwen2.5-0.5b-instruct-q2_k.gguf"),
        (QWEN[:3], None, "qwen2.5-0.5b-instruct-fp16.gguf"),
        (BARTOWSKI, None, "Llama-3.2-1B-Instruct-Q4_K_M.gguf"),
        (BARTOWSKI, "Q4_K_M", "Llama-3.2-1B-Instruct-Q4_K_M.gguf"),
        (["Meta-Llama-3-8B.Q5_K_M.gguf"], "q5_k_m", "Meta-Llama-3-8B.Q5_K_M.gguf"),
        (["Q6_K/model.gguf"], "Q6_K", "Q6_K/model.gguf"),
        (["a-IQ2_M.gguf", "b-Q8_0.gguf"], None, "b-Q8_0.gguf"),
    ],
)
def test_the_file_that_is_meant(names, wanted, chosen):
    assert choose_gguf(names, wanted, "owner/name") == chosen


@pytest.mark.parametrize(
    ("names", "wanted", "says"),
    [
        ([], None, "neither safetensors nor GGUF"),
        (["pytorch_model.bin"], "Q4_K_M", "neither safetensors nor GGUF"),
        (QWEN, "Q4_K", "no GGUF file that is quantized as Q4_K: use owner/name:qwen2.5-0.5b-instruct-fp16.gguf, "),
        (QWEN, "other.gguf", "no file 'other.gguf'"),
        (BARTOWSKI, "NVFP4", "quantized in a way that Quire does not read"),
        (BARTOWSKI, "BF16", "is a part of a file.*--merge"),
        (
            ["a-Q8_0.gguf", "b-Q8_0.gguf"],
            "Q8_0",
            "2 files for Q8_0: use owner/name:a-Q8_0.gguf, owner/name:b-Q8_0.gguf",
        ),
        ([f"m{i}-Q2_K.gguf" for i in range(30)], "Q8_0", "or one of 18 more"),
    ],
)
def test_refusals_name_what_there_is(names, wanted, says):
    with pytest.raises(DownloadError, match=says):
        choose_gguf(names, wanted, "owner/name")


GGUF = "tiny-q4_k_m.gguf"


@pytest.fixture
def use_hub(tmp_path, monkeypatch):
    """From now on, the hub is at this address."""

    def use(address: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return use


@pytest.fixture
def quire(capsys):
    def run(*arguments: str, fails: bool = False) -> str:
        assert (main(list(arguments)) != 0) is fails
        out, err = capsys.readouterr()
        return err if fails else out

    return run


def here(quire) -> list[dict]:
    return [row for row in json.loads(quire("models", "--json")) if row["cached"]]


def test_a_gguf_file_by_its_quantization_from_pull_to_rm(quire, use_hub, tmp_path, write_gguf):
    content = write_gguf().read_bytes()
    files = {GGUF: content, "tiny-q8_0.gguf": b"x" * 1000, "README.md": b"text"}
    with fake_hub.serve({"owner/tiny-GGUF": files}) as (address, asked):
        use_hub(address)
        pulled = json.loads(quire("pull", "owner/tiny-GGUF:Q4_K_M", "--json"))
        assert pulled["path"].endswith(GGUF) and pulled["bytes"] == len(content)
        assert not any("q8_0" in path for path in asked)
        assert "no GGUF file that is quantized as Q5_0" in quire("pull", "owner/tiny-GGUF:Q5_0", fails=True)
        assert "does not exist or is private" in quire("pull", "owner/absent:Q4_0", fails=True)
    # The hub is gone: what is here is still found by the same name, and without one.
    use_hub("http://127.0.0.1:1")
    for model in ("owner/tiny-GGUF:q4_k_m", "owner/tiny-GGUF"):
        assert json.loads(quire("pull", model, "--json"))["path"] == pulled["path"]
    assert "hub cannot be reached" in quire("pull", "owner/other:Q4_0", fails=True)
    (row,) = here(quire)
    assert (row["model"], row["bytes"]) == (f"owner/tiny-GGUF:{GGUF}", len(content))
    assert "removed owner/tiny-GGUF" in quire("rm", "owner/tiny-GGUF:Q4_K_M")
    assert not list((tmp_path / "hub").glob("models--*"))


def test_safetensors_by_an_alias(quire, use_hub, tmp_path):
    files = {"config.json": json.dumps(fakes.TINY_LLAMA).encode(), "model.safetensors": b"1" * 100, "x.bin": b"2"}
    with fake_hub.serve({"Qwen/Qwen3-0.6B": files}) as (address, asked):
        use_hub(address)
        pulled = json.loads(quire("pull", "qwen3-0.6b", "--json"))
    assert pulled["bytes"] == 100 + len(files["config.json"])
    assert not any("x.bin" in path for path in asked)
    (row,) = here(quire)
    assert (row["model"], row["licence"], row["bytes"]) == ("qwen3-0.6b", "Apache-2.0", pulled["bytes"])
    quire("rm", "Qwen/Qwen3-0.6B")
    assert not list((tmp_path / "hub").glob("models--*"))
