from __future__ import annotations

import subprocess
import sys
import threading
import time

from quire.weights.locks import FileLock


def test_one_holder_at_a_time(tmp_path):
    path = tmp_path / "deep" / "x.lock"
    waited, entered = threading.Event(), threading.Event()

    def second():
        with FileLock(path, on_wait=waited.set):
            entered.set()

    with FileLock(path):
        thread = threading.Thread(target=second)
        thread.start()
        assert waited.wait(5)
        time.sleep(0.15)
        assert not entered.is_set()
    assert entered.wait(5)
    thread.join()


def test_a_killed_holder_holds_nothing(tmp_path):
    path = tmp_path / "x.lock"
    code = (
        "import sys, time; from pathlib import Path; from quire.weights.locks import FileLock\n"
        "with FileLock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        waits = []
        releaser = threading.Timer(0.2, holder.kill)
        releaser.start()
        with FileLock(path, on_wait=lambda: waits.append(1)):
            assert waits == [1]
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
