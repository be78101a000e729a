"""Templates that attack: each is stopped, says why, and the next one renders."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.errors import BadRequestError, TemplateLimitError, TokenizerError
from quire.text import ChatTemplate, Tokenizer, chat_template
from quire.text.template_process import TemplateProcesses

USER = {"role": "user", "content": "Hi"}
LOOPS = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
DOUBLES = "{% set x = namespace(y='a' * 99999) %}{% for i in range(40) %}{% set x.y = x.y ~ x.y %}{% endfor %}{{ x.y }}"


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[TemplateProcesses]:
    made = TemplateProcesses(cpu_s=0.25)
    monkeypatch.setattr(chat_template, "processes", made)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("attack", "limit"),
    [
        (LOOPS, "took more than 0.25 s of processor time"),
        (DOUBLES, "more than"),  # time or memory, whichever ends first
        ("{{ 'a'.replace('', 'b' * 99999).replace('b', 'c' * 99999) }}", "needed more than 512 MiB of memory"),
    ],
)
def test_what_takes_too_much_is_stopped(
    processes: TemplateProcesses, byte_level: Tokenizer, attack: str, limit: str
) -> None:
    with pytest.raises(TemplateLimitError) as stopped:
        ChatTemplate(attack, byte_level).render([USER])
    assert limit in stopped.value.limit
    assert str(stopped.value).startswith(f"the chat template {stopped.value.limit} and was stopped: ")
    assert ChatTemplate(None, byte_level).render([USER]).startswith("<|im_start|>user")


def test_the_models_own_template_is_named(processes: TemplateProcesses, byte_level: Tokenizer) -> None:
    tokenizer = Tokenizer(
        byte_level.backend, source="m.gguf", vocab_size=9, named_token_ids={}, chat_templates={"default": LOOPS}
    )
    with pytest.raises(TemplateLimitError, match=r"^the chat template of m\.gguf took more than"):
        ChatTemplate(None, tokenizer).render([USER])


def test_what_cannot_work_is_tried_once(processes: TemplateProcesses, byte_level: Tokenizer) -> None:
    template = ChatTemplate(LOOPS, byte_level)
    for _ in range(3):
        with pytest.raises(TemplateLimitError, match="processor time"):
            template.encode([USER])
        assert not processes._idle  # none was started for the second and third
    # One that only some messages make slow is.
    slow = ChatTemplate("{% if messages | length > 5 %}" + LOOPS + "{% endif %}", byte_level)
    with pytest.raises(TemplateLimitError):
        slow.encode([USER] * 6)
    assert slow.encode([USER]) == ("", [])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ '%1000000000d' | format(1) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ 'x' * 1000000000 }}",
        "{{ [1] * 1000000000 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ 'x' | center(1000000000) }}",
        "{{ 'x' | indent(1000000000) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ 'x'.zfill(width=1000000000) }}",
        "{{ 1.5 | round(1000000000, 'ceil') }}",
        "{{ [1] | batch(1000000000, 2) | list }}",
        "{{ [1] | slice(1000000000) | list }}",
        "{{ messages | tojson(indent=1000000000) }}",
    ],
)
def test_what_is_far_too_wide_is_forbidden(byte_level: Tokenizer, attack: str) -> None:
    with pytest.raises(TokenizerError, match=r"sandbox forbids \(.*more than"):
        ChatTemplate(attack, byte_level).render([USER])


def test_what_templates_do_with_numbers_is_allowed(byte_level: Tokenizer) -> None:
    source = "{{ '%05.2f' | format(1234567) }} {{ 12 * 1000000 }} {{ '-' * 3 }} {{ 'a' | indent(4) }} {{ 7 % 4 }}"
    assert ChatTemplate(source, byte_level).render([USER]) == "1234567.00 12000000 --- a 3"
    assert ChatTemplate("{{ 'x: {}'.format(10000000) }}", byte_level).render([USER]) == "x: 10000000"


@pytest.mark.parametrize("attack", ["{{ lipsum(1000000) }}", "{{ range(1000000) | length }}", "{{ 1 + " * 5000 + "1"])
def test_other_attacks_are_refused(byte_level: Tokenizer, attack: str) -> None:
    with pytest.raises((BadRequestError, TokenizerError), match=r"lipsum|Range too big|not valid jinja2"):
        ChatTemplate(attack, byte_level).render([USER])


def test_a_templates_own_words_are_cut(byte_level: Tokenizer) -> None:
    template = ChatTemplate("{{ raise_exception(messages[0].content) }}", byte_level)
    with pytest.raises(BadRequestError, match=r"a\.\.\.$") as refused:
        template.render([{"role": "user", "content": "a" * 100_000}])
    assert len(str(refused.value)) < 1_000


def test_only_plain_data_goes_to_the_other_process(byte_level: Tokenizer) -> None:
    template = ChatTemplate("{{ x }}", byte_level)
    assert template.render([USER], x=[1, OrderedDict(a=None)]) == "[1, {'a': None}]"
    with pytest.raises(BadRequestError, match="must be plain data, and object is not"):
        template.render([USER], x=object())
    deep: list[object] = []
    for _ in range(3_000):
        deep = [deep]
    with pytest.raises(BadRequestError, match="nested too deeply"):
        template.render([USER], x=deep)


def test_the_process_knows_no_secrets(
    processes: TemplateProcesses, byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    monkeypatch.setenv("TZ", "Europe/Berlin")
    assert ChatTemplate("{{ strftime_now('%Y') }}", byte_level).render([USER]).isdigit()
    (process,) = processes._idle
    environ = Path(f"/proc/{process._process.pid}/environ")
    if environ.exists():
        assert environ.read_bytes() == b"TZ=Europe/Berlin\0"


def test_a_process_that_is_killed_is_replaced(processes: TemplateProcesses, byte_level: Tokenizer) -> None:
    template = ChatTemplate(None, byte_level)
    killed = processes._idle[0]._process
    killed.kill()
    killed.wait()
    assert template.render([USER])
    (process,) = processes._idle
    assert process._process is not killed
    # Under way it is no template's fault, so that nothing is remembered against it.
    with ThreadPoolExecutor(1) as threads:
        stuck = threads.submit(ChatTemplate(LOOPS, byte_level).render, [USER])
        while processes._idle:
            time.sleep(0.001)
        process._process.kill()
        with pytest.raises(TokenizerError, match=r"its process did, with status -9|processor time"):
            stuck.result()
    assert template.encode([USER])


def test_threads_share_two_processes(processes: TemplateProcesses, byte_level: Tokenizer) -> None:
    template = ChatTemplate(None, byte_level)
    rendered: list[str] = []

    def render(name: str) -> None:
        rendered.extend(template.render([{"role": "user", "content": name}]) for _ in range(20))

    threads = [threading.Thread(target=render, args=(str(i),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    once = [template.render([{"role": "user", "content": str(i)}]) for i in range(8)]
    assert sorted(rendered) == sorted(once * 20)
    assert len(processes._idle) <= 2


PROGRAM = """
import os, tokenizers
from quire.text import ChatTemplate, Tokenizer
tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), source="x", vocab_size=1, named_token_ids={})
template = ChatTemplate("{{ messages[0].content }}", tokenizer)
from quire.text.template_process import processes
pid = processes._idle[0]._process.pid
child = os.fork()
text = template.render([{"role": "user", "content": "child" if child == 0 else "parent"}])
if child == 0:
    os._exit(0 if text == "child" else 1)
assert os.waitpid(child, 0)[1] == 0 and text == "parent"
print(pid)
"""


def test_a_fork_has_its_own_and_none_outlives_its_program() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
