"""Processes that chat templates run in, from the caller's side."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import marshal
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from quire.text import template_worker
from quire.text.template_worker import HEADER, MAX_TEXT_CHARS, MEMORY_BYTES

# A template that waits for a processor is not slow: its limit is processor time. This one is for a machine that stands.
_WALL_S = 60.0
_MAX_PROCESSES = 2
_MAX_ANSWER_BYTES = 8 * MAX_TEXT_CHARS
_KEPT_VARIABLES = ("TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


class TemplateStopped(Exception):
    """A task went over a limit, and its process was ended or it gave up."""


class TemplateProcessDied(Exception):
    """A task was not finished, and it need not be the template's fault."""


class TemplateProcess:
    """One worker. It ends with us: its stdin closes then."""

    def __init__(self, cpu_s: float) -> None:
        self._cpu_s = cpu_s
        # Nothing but jinja2 on its path, and no environment in which keys may stand.
        roots = dict.fromkeys(str(Path(_origin(name)).parent.parent) for name in ("jinja2", "markupsafe"))
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", template_worker.__file__, str(cpu_s), *roots],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
            process_group=0,  # Ctrl-C in a terminal goes to the program alone
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._tasks, self._answers = self._process.stdin, self._process.stdout

    def run(self, task: bytes) -> Any:
        """The answer to a task. Raises TemplateStopped or TemplateProcessDied; the process has ended then."""
        try:
            self._tasks.write(HEADER.pack(len(task)) + task)
            self._tasks.flush()
            if not select.select([self._answers], [], [], _WALL_S)[0]:
                raise TemplateProcessDied(f"did not end within {_WALL_S:g} s")
            (num_bytes,) = HEADER.unpack(self._read(HEADER.size))
            if num_bytes > _MAX_ANSWER_BYTES:
                raise TemplateStopped(f"wrote more than {MAX_TEXT_CHARS:,} characters")
            return json.loads(self._read(num_bytes).decode("utf-8", "surrogatepass"))
        except (EOFError, BrokenPipeError):
            status = self._process.wait()
            self.close()
            if status == -signal.SIGPROF:
                raise TemplateStopped(f"took more than {self._cpu_s:g} s of processor time") from None
            raise TemplateProcessDied(f"did not end: its process did, with status {status}") from None
        except BaseException:
            self.close()  # the next task would read the answer that was not read here
            raise

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def _read(self, num_bytes: int) -> bytes:
        data = self._answers.read(num_bytes)
        if len(data) < num_bytes:
            raise EOFError
        return data

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._tasks, self._answers):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class TemplateProcesses:
    """Up to two processes, started when they are needed: while one renders something long, others have the second."""

    def __init__(self, cpu_s: float = 2.0) -> None:
        self._cpu_s = cpu_s
        self.forget()

    def forget(self) -> None:
        """Begin without processes; after a fork, too, where they are the parent's."""
        self._idle: list[TemplateProcess] = []
        self._places = threading.Semaphore(_MAX_PROCESSES)
        self._lock = threading.Lock()

    def run(self, template: tuple[Any, ...], task: tuple[Any, ...] | None = None) -> dict[str, Any]:
        """The answer to a task for a template, or to compiling it. `template` is (key, source, marks).

        Raises as a process's `run` does, and ValueError for a task that holds other things than plain data.
        """
        compiling = ("compile", *template)
        data = marshal.dumps(compiling if task is None else (task[0], template[0], *task[1:]))
        with self._places:
            process = self._take()
            answer: dict[str, Any] = process.run(data)
            if answer.get("error") == "unknown":  # a new process, or one that has seen many since
                process.run(marshal.dumps(compiling))
                answer = process.run(data)
            with self._lock:
                self._idle.append(process)
        match answer.get("error"):
            case "memory":
                raise TemplateStopped(f"needed more than {MEMORY_BYTES >> 20} MiB of memory")
            case "text":
                raise TemplateStopped(f"wrote more than {MAX_TEXT_CHARS:,} characters")
        return answer

    def _take(self) -> TemplateProcess:
        while True:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None:
                return TemplateProcess(self._cpu_s)
            if process.is_running:
                return process
            process.close()  # it was ended meanwhile: by the kernel, when memory ran out

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.close()


def _origin(name: str) -> str:
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None, f"{name} is one of our requirements"
    return found.origin


# One set for the program: templates are many, and a process takes 20 MB.
processes = TemplateProcesses()
atexit.register(processes.close)
os.register_at_fork(after_in_child=processes.forget)
