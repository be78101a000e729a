"""From a chat's answer to a response's output items, whole or as the events of a stream, which are numbered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from quire.server.relay import event, parts_of, tool_call

_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


class Items:
    """A response's output items, as they grow. The last one may be open."""

    def __init__(self, response_id: str) -> None:
        self._name = response_id.removeprefix("resp_")
        self.items: list[dict[str, Any]] = []

    def add(self, kind: str, **fields: Any) -> dict[str, Any]:
        item_id = f"{_PREFIXES[kind]}_{self._name}_{len(self.items)}"
        item = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        self.items.append(item)
        return item

    def message(self) -> dict[str, Any]:
        """All of it as one message of a chat, for the conversation that goes on from here."""
        message: dict[str, Any] = {"role": "assistant"}
        for item in self.items:
            if item["type"] == "reasoning":
                message["reasoning"] = item["content"][0]["text"]
            elif item["type"] == "message":
                message["content"] = item["content"][0]["text"]
            else:
                call = tool_call(item["call_id"], item["name"], item["arguments"])
                message.setdefault("tool_calls", []).append(call)
        if "tool_calls" not in message:
            message.setdefault("content", "")
        return message


class ResponseTranslation:
    """One response. `on_done` is told the whole of it at its end."""

    names: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }

    def __init__(self, head: dict[str, Any], on_done: Callable[[dict[str, Any], Items], None]) -> None:
        self.head = head
        self._on_done = on_done
        self._items = Items(head["id"])
        self._number = 0
        self._has_begun = False
        self._is_over = False
        self._usage: dict[str, Any] | None = None
        self._finish_reason: str | None = None

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        (choice,) = answer["choices"]
        message = choice["message"]
        if thought := message.get("reasoning"):
            self._items.add("reasoning", summary=[], content=[{"type": "reasoning_text", "text": thought}])
        calls = message.get("tool_calls") or []
        if message.get("content") or not calls:
            self._items.add("message", role="assistant", content=[_output_text(message.get("content") or "")])
        for call in calls:
            self._items.add("function_call", call_id=call["id"], **call["function"])
        for item in self._items.items:
            item["status"] = "completed"
        self._usage, self._finish_reason = answer["usage"], choice["finish_reason"]
        return self._done()

    def chunk(self, chunk: dict[str, Any]) -> list[bytes]:
        if "error" in chunk:
            self._is_over = True
            error = {"code": chunk["error"]["code"] or chunk["error"]["type"], "message": chunk["error"]["message"]}
            failed = self.head | {"status": "failed", "error": error, "output": self._items.items}
            return [self._event("response.failed", response=failed)]
        events: list[bytes] = []
        if not self._has_begun:
            self._has_begun = True
            events += [self._event(f"response.{kind}", response=self.head) for kind in ("created", "in_progress")]
        self._usage = chunk.get("usage") or self._usage
        for kind, part in parts_of(chunk):
            if kind == "call":
                events += self._in_call(part)
            elif kind == "end":
                self._finish_reason = part["finish_reason"]
            else:
                events += self._in_text("reasoning" if kind == "reasoning" else "message", part)
        return events

    def ending(self) -> list[bytes]:
        if self._is_over:
            return []
        events = self._close()
        if not self._items.items:
            events += [*self._in_text("message", ""), *self._close()]
        response = self._done()
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def _done(self) -> dict[str, Any]:
        is_cut = self._finish_reason == "length"
        usage = self._usage or {}
        num_cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        num_thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
        response = self.head | {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items.items,
            "usage": {
                "input_tokens": usage.get("prompt_tokens", 0),
                "input_tokens_details": {"cached_tokens": num_cached},
                "output_tokens": usage.get("completion_tokens", 0),
                "output_tokens_details": {"reasoning_tokens": num_thought},
                "total_tokens": usage.get("total_tokens", 0),
            },
        }
        self._on_done(response, self._items)
        return response

    def _open(self) -> dict[str, Any] | None:
        last = self._items.items[-1] if self._items.items else None
        return last if last is not None and last["status"] == "in_progress" else None

    def _in_text(self, kind: str, text: str) -> list[bytes]:
        """A piece of a thought or of a message."""
        events: list[bytes] = []
        item = self._open()
        if item is None or item["type"] != kind:
            events += self._close()
            fields: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
            item = self._items.add(kind, content=[], **fields)
            events.append(self._item_event("added", item))
            item["content"].append(_output_text("") if kind == "message" else {"type": "reasoning_text", "text": ""})
            events.append(self._part_event("added", item))
        item["content"][0]["text"] += text
        if text:
            events.append(self._text_event("delta", item, delta=text))
        return events

    def _in_call(self, call: dict[str, Any]) -> list[bytes]:
        events: list[bytes] = []
        function = call["function"]
        if "id" in call:
            events += self._close()
            item = self._items.add("function_call", call_id=call["id"], name=function["name"], arguments="")
            events.append(self._item_event("added", item))
        if arguments := function["arguments"]:
            item = self._items.items[-1]
            item["arguments"] += arguments
            events.append(self._event("response.function_call_arguments.delta", **self._place(item), delta=arguments))
        return events

    def _close(self) -> list[bytes]:
        item = self._open()
        if item is None:
            return []
        item["status"] = "completed"
        if item["type"] == "function_call":
            fields = {**self._place(item), "name": item["name"], "arguments": item["arguments"]}
            done = [self._event("response.function_call_arguments.done", **fields)]
        else:
            done = [self._text_event("done", item, text=item["content"][0]["text"]), self._part_event("done", item)]
        return [*done, self._item_event("done", item)]

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self._items.items) - 1}

    def _part_event(self, what: str, item: dict[str, Any]) -> bytes:
        place = {**self._place(item), "content_index": 0}
        return self._event(f"response.content_part.{what}", **place, part=item["content"][0])

    def _text_event(self, what: str, item: dict[str, Any], **text: str) -> bytes:
        fields: dict[str, Any] = {**self._place(item), "content_index": 0, **text}
        if item["type"] == "reasoning":
            return self._event(f"response.reasoning_text.{what}", **fields)
        return self._event(f"response.output_text.{what}", **fields, logprobs=[])

    def _item_event(self, what: str, item: dict[str, Any]) -> bytes:
        return self._event(f"response.output_item.{what}", output_index=len(self._items.items) - 1, item=item)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        self._number += 1
        return event(name, {"sequence_number": self._number - 1, **fields})


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
