"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from quire.engine.api import ServingEngine
from quire.server.chat import render
from quire.server.endpoint import Exchange
from quire.server.errors import bad_request
from quire.server.protocol import DetokenizeBody, TokenizeBody
from quire.server.replies import Text, Tokens
from quire.server.text_work import request_deadline
from quire.text import Tokenizer
from quire.text.tokenizer import worth_of_work

# Fields that only a chat may have.
_CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


async def tokenize(exchange: Exchange, body: TokenizeBody) -> None:
    """Token ids of a text or a conversation."""
    await exchange.reply(await tokens_of(exchange, body))


async def tokens_of(exchange: Exchange, body: TokenizeBody) -> Tokens:
    """The tokens of a text or a chat, made off the event loop where that takes long."""
    engine = exchange.context.find(body.model).served.engine
    tokenizer = _tokenizer(engine)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("send either prompt or messages", "prompt")
    at_most = engine.info.max_model_len
    for name in _CHAT_FIELDS:
        if body.messages is None and getattr(body, name):
            raise bad_request(f"{name} belongs to messages, and this is a prompt", name)

    def make() -> Tokens:
        if body.prompt is not None:
            add_special_tokens = body.add_special_tokens is not False
            token_ids = tokenizer.encode(body.prompt, add_special_tokens=add_special_tokens, at_most=at_most)
        else:
            token_ids = render(engine, body)["prompt_token_ids"]
        names = [tokenizer.token(token_id) for token_id in token_ids] if body.return_token_strs else None
        return Tokens(count=len(token_ids), max_model_len=at_most, tokens=token_ids, token_strs=names)

    num_chars = exchange.num_body_bytes if body.prompt is None else len(body.prompt)
    work = exchange.context.text_work
    return await work.run(exchange, request_deadline(exchange), make, num_chars, is_chat=body.prompt is None)


async def detokenize(exchange: Exchange, body: DetokenizeBody) -> None:
    """Text of token ids."""
    engine = exchange.context.find(body.model).served.engine
    tokenizer, info = _tokenizer(engine), engine.info
    limit = worth_of_work(info.max_model_len)
    if len(body.tokens) > limit:
        raise bad_request(f"tokens holds {len(body.tokens):,}, and at most {limit:,} are taken at once", "tokens")

    def make() -> Text:
        largest = max(body.tokens, default=0)
        if largest >= info.vocab_size:
            raise bad_request(f"tokens holds {largest}, and the vocabulary ends at {info.vocab_size - 1}", "tokens")
        return Text(tokenizer.decode(body.tokens, skip_special_tokens=False))

    work = exchange.context.text_work
    await exchange.reply(await work.run(exchange, request_deadline(exchange), make, len(body.tokens)))


def _tokenizer(engine: ServingEngine) -> Tokenizer:
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise bad_request("this server has no tokenizer: it takes token ids only")
    return tokenizer
