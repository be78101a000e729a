from __future__ import annotations

import re
from html.parser import HTMLParser

from server_harness import Server

from quire.server.docs_page import docs_page
from quire.server.openapi import openapi_document

VOID = {"meta", "link", "br"}


class Checker(HTMLParser):
    """Counts that what is opened is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        values = dict(attrs)
        if values.get("id"):
            self.ids.add(str(values["id"]))
        if tag == "a":
            self.links.add(str(values["href"]))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    return checker


def test_it_shows_every_path_and_field(server: Server) -> None:
    reply = server.get("/docs")
    assert reply.headers["content-type"].startswith("text/html")
    page = read(reply.text)
    document = openapi_document()
    assert all(path in page.text for path in document["paths"])
    assert all(name in page.text for name in document["components"]["schemas"]["ChatBody"]["properties"])
    assert {link.removeprefix("#") for link in page.links if link.startswith("#")} <= page.ids


def test_it_fetches_nothing_and_runs_nothing(server: Server) -> None:
    reply = server.get("/docs")
    assert "<script" not in reply.text
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert not re.findall(r'(?:src|href)="https?:', reply.text)
    assert "prefers-color-scheme: dark" in reply.text


def test_what_a_document_says_is_text() -> None:
    document = openapi_document() | {"info": {"title": "<b>", "version": "1", "summary": "<script>x</script>"}}
    assert "<script" not in docs_page(document)
