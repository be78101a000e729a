"""Files that clients keep on the server: each its owner's, all in one folder, under one limit.

    file-0123….bin    what it holds
    file-0123….json   what it is; written last and by renaming, so that a file without it was never finished

Whatever a crash leaves half done is removed when the folder is opened again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import msgspec

from quire.errors import ConfigError
from quire.server.errors import ApiError, bad_request, shown

T = TypeVar("T", bound=msgspec.Struct)

_MAX_PART_HEADER_BYTES = 4 << 10
_MAX_FIELD_BYTES = 4 << 10
_PIECE_BYTES = 1 << 16
_MAX_NAME_CHARS = 200
_MAX_FILES = 10_000
PURPOSES = ("batch",)


class FileInfo(msgspec.Struct, kw_only=True):
    """A file, in OpenAI's shape, and its owner, who is not in answers."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    tenant: str = ""


class FileStore:
    """Everything here is quick enough for the event loop: the disk's caches take what is written."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (folder / ".writable").write_bytes(b"")
        except OSError as error:
            raise ConfigError(f"batch_dir {folder} cannot be written: {error.strerror or error}") from None
        self._files = {info.id: info for info in self.load_all("file", FileInfo)}
        for path in folder.glob("file-*.bin"):
            if path.stem not in self._files:
                path.unlink(missing_ok=True)

    @property
    def num_bytes(self) -> int:
        return sum(info.bytes for info in self._files.values())

    def check_room(self, num_bytes: int) -> None:
        if self.num_bytes + num_bytes > self.max_bytes:
            raise ApiError(
                413,
                f"the server keeps {self.max_bytes} bytes of files at most (--batch-dir-bytes) and has "
                f"{self.num_bytes}: delete some with DELETE /v1/files/ID",
                code="no_room",
            )

    def create(self, tenant: str, filename: str, purpose: str) -> FileInfo:
        """An empty file. It counts, and outlives a restart, once it is saved."""
        if len(self._files) >= _MAX_FILES:
            raise ApiError(413, f"the server keeps {_MAX_FILES} files at most: delete some", code="no_room")
        name = f"file-{secrets.token_hex(12)}"
        filename = shown(filename, _MAX_NAME_CHARS)
        info = FileInfo(
            id=name, bytes=0, created_at=int(time.time()), filename=filename, purpose=purpose, tenant=tenant
        )
        self.path(info).write_bytes(b"")
        return info

    def save(self, info: FileInfo) -> None:
        info.bytes = self.path(info).stat().st_size
        self._files[info.id] = info
        self.save_record(info.id, info)

    def get(self, file_id: str, tenant: str) -> FileInfo:
        info = self._files.get(file_id)
        if info is None or info.tenant != tenant:
            raise ApiError(404, f"there is no file {shown(file_id)!r}", param="file_id", code="file_not_found")
        return info

    def list_files(self, tenant: str) -> list[FileInfo]:
        return [info for info in self._files.values() if info.tenant == tenant]

    def delete(self, info: FileInfo) -> None:
        self._files.pop(info.id, None)
        (self.folder / f"{info.id}.json").unlink(missing_ok=True)
        self.path(info).unlink(missing_ok=True)

    def path(self, info: FileInfo) -> Path:
        return self.folder / f"{info.id}.bin"

    def save_record(self, name: str, record: msgspec.Struct) -> None:
        """Keep a small object under a name. A crash leaves the one before."""
        draft = self.folder / f"{name}.draft"
        draft.write_bytes(msgspec.json.encode(record))
        draft.replace(self.folder / f"{name}.json")

    def load_all(self, kind: str, type_: type[T]) -> list[T]:
        """Every object whose name begins like this; what cannot be read is another program's."""
        found = []
        for path in sorted(self.folder.glob(f"{kind}*.json")):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=type_))
            except (OSError, msgspec.DecodeError):
                continue
        return found


async def read_upload(store: FileStore, tenant: str, content_type: str, chunks: AsyncIterator[bytes]) -> FileInfo:
    """A form with `purpose` and `file`, as OpenAI's clients send it: the file goes to the disk as it comes."""
    kind, _, rest = content_type.partition(";")
    boundary = next(
        (part.strip()[9:].strip('"') for part in rest.split(";") if part.strip().startswith("boundary=")), ""
    )
    if kind.strip().lower() != "multipart/form-data" or not 0 < len(boundary) <= 70:
        raise ApiError(415, "send the file as multipart/form-data, with the fields purpose and file", code="no_form")
    info: FileInfo | None = None
    purpose = None
    try:
        async for name, filename, body in _parts(boundary.encode("latin-1"), chunks):
            if name == "file" and info is None:
                info = store.create(tenant, filename or "file", "")
                with store.path(info).open("wb") as file:
                    async for piece in body:
                        store.check_room(file.tell() + len(piece))
                        file.write(piece)
            else:
                value = b""
                async for piece in body:
                    value += piece
                    if len(value) > _MAX_FIELD_BYTES:
                        raise bad_request(f"{shown(name)} is longer than {_MAX_FIELD_BYTES} bytes", shown(name))
                if name != "purpose":
                    raise bad_request(f"{shown(name)} is not a field of this request", shown(name), "unknown_field")
                purpose = value.decode("utf-8", "replace")
        if info is None:
            raise bad_request("file is required", "file", "missing_field")
        if purpose not in PURPOSES:
            raise bad_request(f"purpose must be one of {', '.join(PURPOSES)}", "purpose", "invalid_value")
        info.purpose = purpose
        store.save(info)
        return info
    except BaseException:
        if info is not None:
            store.delete(info)
        raise


async def _parts(
    boundary: bytes, chunks: AsyncIterator[bytes]
) -> AsyncIterator[tuple[str, str | None, AsyncIterator[bytes]]]:
    """A form's parts: name, filename, and the content in pieces, which must be read before the next part is asked for.

    No more is held than a piece and a delimiter's length.
    """
    delimiter = b"\r\n--" + boundary
    buffer = b"\r\n"  # before the first delimiter, which begins the form
    is_over = False

    async def more() -> None:
        nonlocal buffer, is_over
        try:
            buffer += await anext(chunks)
        except StopAsyncIteration:
            is_over = True

    async def until(mark: bytes, limit: int | None) -> AsyncIterator[bytes]:
        nonlocal buffer
        num_bytes = 0
        while (at := buffer.find(mark)) < 0:
            if is_over:
                raise bad_request("the form ends too early", code="invalid_form")
            keep = max(0, len(buffer) - len(mark))
            num_bytes += keep
            if limit is not None and num_bytes > limit:
                raise bad_request("a part of the form has too long a header", code="invalid_form")
            if keep >= _PIECE_BYTES or limit is not None:
                piece, buffer = buffer[:keep], buffer[keep:]
                yield piece
            await more()
        piece, buffer = buffer[:at], buffer[at + len(mark) :]
        yield piece

    async for _ in until(delimiter, _MAX_PART_HEADER_BYTES):
        pass
    while True:
        while len(buffer) < 2 and not is_over:
            await more()
        if buffer[:2] == b"--":
            async for _ in chunks:  # an epilogue, which means nothing
                pass
            return
        head = b""
        async for piece in until(b"\r\n\r\n", _MAX_PART_HEADER_BYTES):
            head += piece
        name, filename = _names(head)
        yield name, filename, until(delimiter, None)


def _names(head: bytes) -> tuple[str, str | None]:
    """The name and filename of a part's Content-Disposition."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        header, _, value = line.partition(":")
        if header.strip().lower() == "content-disposition":
            fields = {
                key.strip().lower(): text.strip().strip('"')
                for key, _, text in (field.partition("=") for field in value.split(";")[1:])
            }
            if "name" in fields:
                return fields["name"], fields.get("filename")
    raise bad_request("a part of the form has no name", code="invalid_form")
