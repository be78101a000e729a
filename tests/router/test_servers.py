"""What a router asks servers about texts."""

from __future__ import annotations

from quire.router.hashes import prompt_hashes
from quire.router.servers import Servers


def text(name: str, length: int) -> str:
    return (f"{name} " * length)[:length]


def test_a_text_is_asked_about_when_it_comes_a_second_time() -> None:
    servers = Servers(["http://a:1"])
    (upstream,) = servers.all.values()
    upstream.is_up = upstream.is_exact = True
    servers.router.add(upstream.url)

    def ask(prompt: str) -> bool:
        """Send a prompt; whether there was a question about it, which is answered at once."""
        found, question = servers.prompt_of({"prompt": prompt}, None)
        servers.router.route(found)
        if question is not None:
            tokens = [ord(letter) for letter in question.text]
            hashes = prompt_hashes(tokens, servers.router.block_size)
            servers._known.learn(question.pieces, question.text, len(tokens), hashes, servers.router.block_size)
        return question is not None

    assert ask(text("one", 300))  # the first of all tells how many tokens a text makes
    assert servers._known.tokens_per_char == 1
    shared = text("two", 300)
    assert not ask(shared + "a")  # nobody may ever send it again
    assert ask(shared + text("b", 100)) and not ask(shared + text("c", 100))
    assert not ask(text("three", 40) + text("x", 400)) and not ask(text("three", 40) + text("y", 400))
