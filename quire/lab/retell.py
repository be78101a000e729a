"""Tells an older report again: charts, tables and words are made anew from the numbers that it holds.

    python -m quire.lab.retell docs/lab/cpu docs/lab/h200

Nothing is measured and no number changes; its date stays that of the measurements.
"""

from __future__ import annotations

import sys
from pathlib import Path

from quire.errors import ConfigError
from quire.lab.store import JSON_NAME, read_report


def main(folders: list[str]) -> None:
    if not folders:
        raise SystemExit("usage: python -m quire.lab.retell FOLDER...")
    for folder in map(Path, folders):
        try:
            read_report(folder / JSON_NAME).write(folder)
        except ConfigError as error:
            raise SystemExit(f"quire.lab.retell: {error}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
