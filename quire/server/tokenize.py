"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from quire.server.chat import render
from quire.server.endpoint import Exchange
from quire.server.errors import bad_request
from quire.server.generation import prepared_in_time
from quire.server.models import check_model
from quire.server.protocol import DetokenizeBody, TokenizeBody
from quire.server.replies import Text, Tokens
from quire.text import Tokenizer

# Of a chat alone.
_CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")


async def tokenize(exchange: Exchange, body: TokenizeBody) -> None:
    check_model(exchange.context, body.model)
    engine, tokenizer = exchange.context.engine, _tokenizer(exchange)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("send either prompt or messages", "prompt")
    token_ids: list[int]
    if body.prompt is not None:
        text = body.prompt
        for name in _CHAT_FIELDS:
            if getattr(body, name):
                raise bad_request(f"{name} belongs to messages, and this is a prompt", name)
        add_special_tokens = body.add_special_tokens is not False
        token_ids = await prepared_in_time(
            lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens), len(text)
        )
    else:
        prompt = await prepared_in_time(lambda: render(engine, body), exchange.num_body_bytes)
        token_ids = prompt["prompt_token_ids"]
    names = [tokenizer.token(token_id) for token_id in token_ids] if body.return_token_strs else None
    answer = Tokens(count=len(token_ids), max_model_len=engine.info.max_model_len, tokens=token_ids, token_strs=names)
    await exchange.reply(answer)


async def detokenize(exchange: Exchange, body: DetokenizeBody) -> None:
    check_model(exchange.context, body.model)
    tokenizer, vocab_size = _tokenizer(exchange), exchange.context.engine.info.vocab_size
    for token_id in body.tokens:
        if token_id >= vocab_size:
            raise bad_request(f"tokens holds {token_id}, and the vocabulary ends at {vocab_size - 1}", "tokens")
    text = await prepared_in_time(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False), len(body.tokens))
    await exchange.reply(Text(text))


def _tokenizer(exchange: Exchange) -> Tokenizer:
    tokenizer = exchange.context.engine.tokenizer
    if tokenizer is None:
        raise bad_request("this server has no tokenizer: it takes token ids only")
    return tokenizer
