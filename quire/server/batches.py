"""`/v1/files` and `/v1/batches`: files of requests that the server answers beside its other work.

    validating ─▶ in_progress ─▶ finalizing ─▶ completed
        │             ├─▶ cancelling ─▶ cancelled
        └─▶ failed ◀──┘

One batch runs at a time. Its requests have the lowest priority among their key's own, so that requests of
waiting clients go first. Everything is kept on disk: after a restart a batch goes on with the lines without an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response

from quire.errors import ConfigError, EngineDeadError
from quire.log import get_logger
from quire.params import MAX_PRIORITY
from quire.server.endpoint import Exchange, json_response, tenant_of
from quire.server.errors import ApiError, bad_request, shown
from quire.server.file_store import FileInfo, FileStore, read_upload
from quire.server.request_files import (
    AnswerFile,
    EndpointCaller,
    FileError,
    RequestCounts,
    count_lines,
    errors_of_file,
    numbered_lines,
    read_answered,
    run_lines,
)

if TYPE_CHECKING:
    from quire.server.context import ServerContext
    from quire.server.settings import ServerSettings

_DAY_S = 24 * 3600
_MAX_LISTED = 100
_MAX_BATCHES = 1_000
_SAVE_S = 2.0  # counts on disk are as old at most
_ENDED = ("completed", "failed", "cancelled")


class Batch(msgspec.Struct, kw_only=True):
    """A batch, in OpenAI's shape, and its owner, who is not in answers."""

    id: str
    object: str = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str = "validating"
    errors: dict[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: None = None  # a batch goes on until it is done
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None
    tenant: str = ""

    def enter(self, status: str) -> None:
        self.status = status
        if status != "validating":
            setattr(self, f"{status}_at", int(time.time()))

    def fail(self, errors: list[FileError]) -> None:
        self.errors = {"object": "list", "data": msgspec.to_builtins(errors)}
        self.enter("failed")


class BatchBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"] = "24h"
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None


class Batches:
    """The batches of one server, and the task that runs them."""

    def __init__(self, folder: str, max_bytes: int) -> None:
        self.store = FileStore(Path(folder).expanduser(), max_bytes)
        self._batches = {batch.id: batch for batch in self.store.load_all("batch", Batch)}
        self._task: asyncio.Task[None] | None = None
        self._running: tuple[Batch, asyncio.Task[None]] | None = None

    @classmethod
    def of(cls, settings: ServerSettings) -> Batches | None:
        """The server's batches; None where the operator gave no folder."""
        return cls(settings.batch_dir, settings.batch_dir_bytes) if settings.batch_dir else None

    def begin(self, context: ServerContext) -> None:
        """Run what is not done yet: with the server's start, and whenever a batch is made."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run_all(context))

    async def stop(self) -> None:
        """Leave everything as it is: the next start goes on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def create(self, body: BatchBody, tenant: str, endpoints: Mapping[str, Any]) -> Batch:
        if body.endpoint not in endpoints:
            raise bad_request(f"endpoint must be one of {', '.join(sorted(endpoints))}", "endpoint", "invalid_value")
        self.store.get(body.input_file_id, tenant)
        if len(self._batches) >= _MAX_BATCHES:
            self._forget_the_oldest()
        now = int(time.time())
        batch = Batch(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + _DAY_S,
            metadata=body.metadata,
            tenant=tenant,
        )
        self._batches[batch.id] = batch
        self._save(batch)
        return batch

    def get(self, batch_id: str, tenant: str) -> Batch:
        batch = self._batches.get(batch_id)
        if batch is None or batch.tenant != tenant:
            raise ApiError(404, f"there is no batch {shown(batch_id)!r}", param="batch_id", code="batch_not_found")
        return batch

    def list_batches(self, tenant: str) -> list[Batch]:
        """A tenant's batches, the newest first."""
        return [batch for batch in reversed(self._batches.values()) if batch.tenant == tenant]

    def cancel(self, batch: Batch) -> None:
        if batch.status in _ENDED:
            raise ApiError(409, f"the batch has ended: it is {batch.status}", code="batch_ended")
        batch.enter("cancelling")
        if self._running is not None and self._running[0] is batch:
            self._running[1].cancel()
        else:
            batch.enter("cancelled")
        self._save(batch)

    def uses(self, file_id: str) -> bool:
        """Whether a batch that has not ended reads or writes this file."""
        return any(
            batch.status not in _ENDED and file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id)
            for batch in self._batches.values()
        )

    async def _run_all(self, context: ServerContext) -> None:
        while waiting := [batch for batch in self._batches.values() if batch.status not in _ENDED]:
            batch = waiting[0]
            running = asyncio.create_task(self._run(batch, context))
            self._running = batch, running
            try:
                await asyncio.wait({running})
            finally:
                self._running = None
                if not running.done():  # the server stops: the batch stays as it is
                    running.cancel()
                    await asyncio.gather(running, return_exceptions=True)
            if running.cancelled() or batch.status == "cancelling":
                batch.enter("cancelled")
            elif (failure := running.exception()) is not None:
                if isinstance(failure, EngineDeadError):
                    return  # the next start goes on
                self._fail(batch, failure)
            self._save(batch)

    async def _run(self, batch: Batch, context: ServerContext) -> None:
        store, max_bytes = self.store, context.settings.max_body_bytes
        source = store.path(store.get(batch.input_file_id, batch.tenant))
        endpoints = {batch.endpoint: context.answering[batch.endpoint]}
        if wrong := await asyncio.to_thread(errors_of_file, source, endpoints, max_bytes):
            batch.fail(wrong)
            return
        output = self._answer_file(batch, batch.output_file_id, "output")
        errors = self._answer_file(batch, batch.error_file_id, "errors")
        batch.output_file_id, batch.error_file_id = output.id, errors.id
        answered = await asyncio.to_thread(read_answered, store.path(output))
        failed = await asyncio.to_thread(read_answered, store.path(errors))
        num_lines = await asyncio.to_thread(count_lines, source, max_bytes)
        batch.request_counts = RequestCounts(num_lines, len(answered), len(failed))
        batch.enter("in_progress")
        self._save(batch)
        caller = EndpointCaller(endpoints, tenant=batch.tenant, defaults={"priority": MAX_PRIORITY})
        saved_s = time.monotonic()
        try:
            with (
                source.open("rb") as file,
                AnswerFile(store.path(output)) as answers,
                AnswerFile(store.path(errors)) as refusals,
            ):

                def write(line: bytes, is_good: bool) -> None:
                    nonlocal saved_s
                    store.check_room(len(line))
                    (answers if is_good else refusals).write(line)
                    info = output if is_good else errors
                    info.bytes += len(line)
                    if time.monotonic() - saved_s > _SAVE_S:
                        saved_s = time.monotonic()
                        self._save(batch)

                await run_lines(
                    numbered_lines(file, max_bytes),
                    caller,
                    write,
                    batch.request_counts,
                    answered=answered | failed,
                    max_line_bytes=max_bytes,
                    num_at_once=context.first.engine.info.max_num_seqs,
                )
            batch.enter("finalizing")
        finally:
            store.save(output)
            store.save(errors)
            if not errors.bytes and batch.status == "finalizing":
                batch.error_file_id = None
                store.delete(errors)
        batch.enter("completed")

    def _answer_file(self, batch: Batch, file_id: str | None, kind: str) -> FileInfo:
        if file_id is not None:
            with contextlib.suppress(ApiError):
                return self.store.get(file_id, batch.tenant)
        info = self.store.create(batch.tenant, f"{batch.id}-{kind}.jsonl", "batch_output")
        self.store.save(info)
        return info

    def _fail(self, batch: Batch, failure: BaseException) -> None:
        if not isinstance(failure, (ApiError, ConfigError)):
            get_logger().error("batch %s failed", batch.id, exc_info=failure)
        told = str(failure) if isinstance(failure, (ApiError, ConfigError)) else "the server failed; its log says why"
        batch.fail([FileError("failed", told)])

    def _save(self, batch: Batch) -> None:
        self.store.save_record(batch.id, batch)

    def _forget_the_oldest(self) -> None:
        ended = next((batch for batch in self._batches.values() if batch.status in _ENDED), None)
        if ended is None:
            raise ApiError(429, f"{_MAX_BATCHES} batches wait already", code="too_many_batches")
        del self._batches[ended.id]
        (self.store.folder / f"{ended.id}.json").unlink(missing_ok=True)


def _batches(context: ServerContext) -> Batches:
    if context.batches is None:
        raise ApiError(501, "this server keeps no files: start it with --batch-dir FOLDER", code="no_batch_dir")
    return context.batches


def _file(context: ServerContext, request: HttpRequest) -> FileInfo:
    return _batches(context).store.get(request.path_params["id"], tenant_of(request.scope))


def _batch(context: ServerContext, request: HttpRequest) -> Batch:
    return _batches(context).get(request.path_params["id"], tenant_of(request.scope))


async def upload_file(context: ServerContext, request: HttpRequest) -> Response:
    """Upload a file of requests as a form with `purpose` (batch) and `file`."""
    store, tenant = _batches(context).store, tenant_of(request.scope)
    info = await read_upload(store, tenant, request.headers.get("content-type", ""), request.stream())
    return json_response(_told(info))


async def list_files(context: ServerContext, request: HttpRequest) -> Response:
    """List your files."""
    return _page(_batches(context).store.list_files(tenant_of(request.scope)), request)


async def show_file(context: ServerContext, request: HttpRequest) -> Response:
    """Describe one of your files."""
    return json_response(_told(_file(context, request)))


async def show_content(context: ServerContext, request: HttpRequest) -> Response:
    """Download the content of a file."""
    info = _file(context, request)
    return FileResponse(_batches(context).store.path(info), media_type="application/octet-stream")


async def delete_file(context: ServerContext, request: HttpRequest) -> Response:
    """Delete a file that no unfinished batch uses."""
    info, batches = _file(context, request), _batches(context)
    if batches.uses(info.id):
        raise ApiError(409, "a batch that has not ended uses this file: cancel it first", code="file_in_use")
    batches.store.delete(info)
    return json_response({"id": info.id, "object": "file", "deleted": True})


async def list_batches(context: ServerContext, request: HttpRequest) -> Response:
    """List your batches, the newest first."""
    return _page(_batches(context).list_batches(tenant_of(request.scope)), request)


async def create_batch(exchange: Exchange, body: BatchBody) -> None:
    """Answer a file's requests beside everything else, with the lowest priority."""
    batches = _batches(exchange.context)
    made = batches.create(body, exchange.tenant, exchange.context.answering)
    batches.begin(exchange.context)
    await exchange.reply(_told(made))


async def show_batch(context: ServerContext, request: HttpRequest) -> Response:
    """Describe a batch and how far it is."""
    return json_response(_told(_batch(context, request)))


async def cancel_batch(context: ServerContext, request: HttpRequest) -> Response:
    """Cancel a batch; the answers that it has stay."""
    batch = _batch(context, request)
    _batches(context).cancel(batch)
    return json_response(_told(batch))


def _told(record: FileInfo | Batch) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(record)
    del told["tenant"]
    if isinstance(record, FileInfo):
        told["status"] = "processed"  # older clients want it
    return told


def _page(records: list[Any], request: HttpRequest) -> Response:
    """A page of a list, as OpenAI's clients walk it: `after` an id, `limit` at most."""
    after, limit = request.query_params.get("after"), request.query_params.get("limit", "20")
    if not limit.isdigit() or not 1 <= int(limit) <= _MAX_LISTED:
        raise bad_request(f"limit must be 1 to {_MAX_LISTED}", "limit")
    if after is not None:
        ids = [record.id for record in records]
        if after not in ids:
            raise bad_request("after must be an id of the list", "after")
        records = records[ids.index(after) + 1 :]
    shown_now = records[: int(limit)]
    return json_response(
        {
            "object": "list",
            "data": [_told(record) for record in shown_now],
            "first_id": shown_now[0].id if shown_now else None,
            "last_id": shown_now[-1].id if shown_now else None,
            "has_more": len(records) > len(shown_now),
        }
    )
