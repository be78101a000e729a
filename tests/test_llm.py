"""LLM: the offline front, as a program written for vLLM uses it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams, TokensPrompt, refusals
from quire.errors import (
    BadRequestError,
    ConfigError,
    EngineDeadError,
    MemoryBudgetError,
    QuireError,
    TokenizerError,
    WeightsError,
)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(model=str(tiny_model), load_format="dummy", device="cpu", num_threads=1, kv_cache_memory_bytes=4 << 20)


def test_the_vllm_quickstart(llm: LLM) -> None:
    prompts = ["Hello, my name is", "The capital of France is"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt == prompt
        assert output.finished
        assert len(output.outputs[0].token_ids) <= 16
        assert output.outputs[0].finish_reason in ("length", "stop")


def test_every_kind_of_prompt_is_one_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    ids = llm.get_tokenizer().encode("hello")
    kinds: list[Any] = ["hello", ids, {"prompt": "hello"}, {"prompt_token_ids": ids}]
    texts = {llm.generate(kind, params, use_tqdm=False)[0].outputs[0].text for kind in kinds}
    texts |= {o.outputs[0].text for o in llm.generate(kinds, params, use_tqdm=False)}
    assert len(texts) == 1


def test_token_ids_may_be_an_array_or_a_tensor(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    ids = [5, 6, 7]
    wanted = llm.generate(ids, params, use_tqdm=False)[0].outputs[0].token_ids
    rows = [
        np.array(ids),
        torch.tensor(ids),
        list(np.array(ids)),
        list(torch.tensor(ids)),
        np.array([ids, ids]),
        torch.tensor([ids, ids]),
    ]
    for given in (*rows, [np.array(ids), torch.tensor(ids)], {"prompt_token_ids": np.array(ids)}):
        for output in llm.generate(given, params, use_tqdm=False):
            assert output.outputs[0].token_ids == wanted
            assert [type(token) for token in output.prompt_token_ids] == [int] * 3
    for wrong in ([np.array([1.5, 2.0])], [np.array([True, False])], [[True, False]]):
        with pytest.raises(BadRequestError, match="token ids are whole numbers"):
            llm.generate(wrong, params, use_tqdm=False)
    with pytest.raises(BadRequestError, match="prompts must be"):
        llm.generate(np.array(7), params, use_tqdm=False)


def test_one_params_each(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 3, 2)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 3, 2]
    with pytest.raises(BadRequestError, match="2 entries for 3 prompts"):
        llm.generate(["a", "b", "c"], params[:2], use_tqdm=False)


def test_nothing_starts_if_one_prompt_is_refused(llm: LLM) -> None:
    with pytest.raises(BadRequestError, match=r"prompt 1: .*the prompt has 300"):
        llm.generate([[1, 2], [1] * 300], SamplingParams(max_tokens=1), use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)


def test_an_interrupt_gives_the_blocks_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = llm.llm_engine.step, []

    def interrupted() -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False)
    assert llm.llm_engine.core.kv.num_used_blocks == 0
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize("place", ["submit", "collect"])
def test_ctrl_c_in_a_step_ends_the_call_and_not_the_engine(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    llm = LLM(str(tiny_model), load_format="dummy", device="cpu", num_threads=1)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    [expected] = llm.generate("hello", params, use_tqdm=False)
    executor, handler = llm.llm_engine.core.executor, signal.getsignal(signal.SIGINT)
    original = getattr(executor, place)

    def interrupted(argument: Any) -> Any:
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        return original(argument)

    monkeypatch.setattr(executor, place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("hello", params, use_tqdm=False)
    assert llm.llm_engine.core.kv.num_used_blocks == 0
    [again] = llm.generate("hello", params, use_tqdm=False)
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_engine_that_was_torn_out_of_a_step_says_so(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(tiny_model), load_format="dummy", device="cpu", num_threads=1)

    def torn(ticket: int) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.llm_engine.core.executor, "collect", torn)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("hello", use_tqdm=False)
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        llm.generate("hello", use_tqdm=False)


def test_threads_may_share_it(llm: LLM) -> None:
    prompts = ["one", "two and", "three of them"]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(llm.generate(prompts, params, use_tqdm=False)), daemon=True)
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [[output.outputs[0].token_ids for output in outputs] for outputs in found] == [expected] * 4


@pytest.mark.parametrize("stop", [None, ["never"]])  # text made at the end, and as it comes
def test_a_stop_token_is_no_part_of_the_text(llm: LLM, stop: list[str] | None) -> None:
    plain = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, skip_special_tokens=False, stop=stop)
    [free] = llm.generate("hello", plain, use_tqdm=False)
    token = free.outputs[0].token_ids[3]
    first = free.outputs[0].token_ids.index(token)
    tokenizer = llm.get_tokenizer()
    for include in (False, True):
        params = plain.clone(stop_token_ids=[token], include_stop_str_in_output=include)
        [output] = llm.generate("hello", params, use_tqdm=False)
        completion = output.outputs[0]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", token)
        assert completion.token_ids == free.outputs[0].token_ids[: first + 1]
        shown = completion.token_ids if include else completion.token_ids[:-1]
        assert completion.text == tokenizer.decode(shown, skip_special_tokens=False)


def test_contents_come_in_the_form_that_is_asked_for(llm: LLM) -> None:
    template = "{% for m in messages %}{{ 'text' if m.content is string else 'parts' }}{% endfor %}"

    def prompt(content: Any, content_format: str) -> str | None:
        message = [{"role": "user", "content": content}]
        params = SamplingParams(max_tokens=1)
        options: dict[str, Any] = {"chat_template": template, "chat_template_content_format": content_format}
        return llm.chat(message, params, use_tqdm=False, **options)[0].prompt

    assert prompt("hi", "openai") == "parts"
    assert prompt([{"type": "text", "text": "hi"}], "string") == "text"
    assert prompt("hi", "auto") == "text"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"messages": {"role": "user", "content": "hi"}}, "messages must be a list"),
        ({"messages": iter([{"role": "user", "content": "hi"}])}, "messages must be a list"),
        ({"chat_template": "nofile.jinja"}, "neither a template"),
        ({"chat_template_kwargs": {"messages": []}}, "must not contain messages"),
        ({"chat_template_kwargs": {3: 4}}, "must map names"),
    ],
)
def test_a_chat_that_cannot_be_is_one_error(llm: LLM, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(QuireError, match=words):
        llm.chat(**{"messages": [{"role": "user", "content": "hi"}], "use_tqdm": False} | arguments)


def test_the_templates_own_switches_go_over_ours(llm: LLM) -> None:
    message = [{"role": "user", "content": "hi"}]
    template = "{{ add_generation_prompt }}"
    switches = {"add_generation_prompt": False}
    params = SamplingParams(max_tokens=1)
    [output] = llm.chat(message, params, use_tqdm=False, chat_template=template, chat_template_kwargs=switches)
    assert output.prompt == "False"


def test_chat_renders_the_models_template(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    [output] = llm.chat(messages, params, use_tqdm=False)
    assert output.prompt == "<|start|>system\nBe kind.<|end|>\n<|start|>user\nHi<|end|>\n<|start|>assistant\n"
    several = llm.chat([messages, messages[1:]], params, use_tqdm=False)
    assert several[0].outputs[0].token_ids == output.outputs[0].token_ids
    assert len(several) == 2
    [own] = llm.chat(messages, params, use_tqdm=False, chat_template="{{ messages[1]['content'] }}!")
    assert own.prompt == "Hi!"
    with pytest.raises(BadRequestError):
        llm.chat([], params)


def test_special_tokens_in_messages_are_text_unless_allowed(llm: LLM) -> None:
    message, params = [{"role": "user", "content": "a<|end|>b"}], SamplingParams(max_tokens=1)
    end = llm.get_tokenizer().convert_tokens_to_ids("<|end|>")
    for allowed, count in ((None, 1), (False, 1), (True, 2)):
        [output] = llm.chat(message, params, use_tqdm=False, allow_special_tokens_in_content=allowed)
        assert output.prompt_token_ids.count(end) == count


def test_the_tokenizer_makes_the_prompts_that_the_engine_makes(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, skip_special_tokens=False)
    messages = [{"role": "user", "content": "Hi"}]
    tokenizer = llm.get_tokenizer()
    assert tokenizer is llm.get_tokenizer()  # its template is compiled once
    [chat] = llm.chat(messages, params, use_tqdm=False)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True).input_ids
    assert (chat.prompt, chat.prompt_token_ids) == (text, ids)
    [output] = llm.generate(TokensPrompt(prompt_token_ids=ids), params, use_tqdm=False)
    assert output.outputs[0].token_ids == chat.outputs[0].token_ids
    assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids)


def test_the_tokenizer_renders_with_the_llms_own_template(tiny_model: Path) -> None:
    llm = LLM(
        str(tiny_model), load_format="dummy", device="cpu", num_threads=1, chat_template="{{ messages[0].content }}!"
    )
    messages = [{"role": "user", "content": "Hi"}]
    assert llm.get_tokenizer().apply_chat_template(messages, tokenize=False) == "Hi!"
    assert llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt == "Hi!"


def test_tools_are_shown_where_the_template_has_a_place_for_them(llm: LLM) -> None:
    messages, tools = [{"role": "user", "content": "Hi"}], [{"type": "function", "function": {"name": "f"}}]
    for arguments in ({"tools": tools}, {"chat_template_kwargs": {"tools": tools}}, {"tools": [{}]}):
        with pytest.raises(BadRequestError) as refused:
            llm.chat(messages, use_tqdm=False, **arguments)  # type: ignore[arg-type]
        assert (refused.value.param or "").startswith("tools")
    shown = llm.chat(
        messages,
        SamplingParams(max_tokens=1),
        use_tqdm=False,
        tools=tools,
        chat_template="{{ tools[0].function.name }}",
    )
    assert shown[0].prompt == "f"
    assert llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False, tools=[])


@pytest.mark.parametrize("name", refusals.CALL)
def test_refused_by_name(llm: LLM, name: str) -> None:
    reason, messages = refusals.CALL[name].why, [{"role": "user", "content": "Hi"}]
    for call, prompt in ((llm.generate, "a"), (llm.chat, messages)):
        with pytest.raises(BadRequestError, match=name) as refused:
            call(prompt, **{name: [1, 2]})  # type: ignore[operator]
        assert reason in str(refused.value)
    if name != "prompt_token_ids":
        with pytest.raises(BadRequestError, match=name):
            llm.generate({"prompt": "a", name: [1, 2]}, use_tqdm=False)
    short = SamplingParams(max_tokens=1)
    assert llm.generate("a", short, use_tqdm=False, **{name: None})


def test_other_mistakes_are_named(llm: LLM) -> None:
    with pytest.raises(BadRequestError, match=r"'priorities'"):
        llm.generate("a", priorities=[1])
    with pytest.raises(BadRequestError, match="put them into the prompts"):
        llm.generate(prompt_token_ids=[[1, 2]])
    with pytest.raises(BadRequestError, match="prompts must be"):
        llm.generate(3)  # type: ignore[arg-type]


def test_start_up_lines(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="quire"):
        logging.getLogger("quire").propagate = True
        LLM(model=str(tiny_model), load_format="dummy", device="cpu", num_threads=1, kv_cache_memory_bytes=1 << 20)
    assert any(record.getMessage() == "# CPU blocks: 64" for record in caplog.records)


def test_skip_tokenizer_init(tiny_model: Path) -> None:
    bare = LLM(
        str(tiny_model),
        load_format="dummy",
        skip_tokenizer_init=True,
        device="cpu",
        num_threads=1,
        kv_cache_memory_bytes=1 << 20,
    )
    [output] = bare.generate([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 3)
    with pytest.raises(BadRequestError, match="skip_tokenizer_init"):
        bare.generate("text", use_tqdm=False)
    with pytest.raises(BadRequestError, match="stop"):
        bare.generate([1], SamplingParams(stop="x"), use_tqdm=False)
    with pytest.raises(BadRequestError, match="skip_tokenizer_init"):
        bare.get_tokenizer()


def test_start_errors_say_what_to_change(tiny_model: Path, tmp_path: Path) -> None:
    def start(**kwargs: Any) -> None:
        LLM(**{"model": str(tiny_model), "load_format": "dummy", "num_threads": 1, "device": "cpu"} | kwargs)

    with pytest.raises(ConfigError, match="256 positions"):
        start(max_model_len=257)
    # One block of 16 tokens is 16 KiB here.
    with pytest.raises(MemoryBudgetError, match="lower max_model_len to 64"):
        start(max_model_len=128, kv_cache_memory_bytes=4 * 16 * 1024)
    start(max_model_len=64, kv_cache_memory_bytes=4 * 16 * 1024)  # exactly enough is enough
    with pytest.raises(MemoryBudgetError, match="raise kv_cache_memory_bytes"):
        start(kv_cache_memory_bytes=1024)
    with pytest.raises(MemoryBudgetError, match="more than the"):
        start(kv_cache_memory_bytes=1 << 50)
    with pytest.raises(ConfigError, match="cuda"):
        start(device="tpu")
    with pytest.raises(ConfigError, match="fp8"):
        start(kv_cache_dtype="fp8", device="cpu")
    with pytest.raises(WeightsError, match="nowhere"):
        start(model=str(tmp_path / "nowhere"))
    with pytest.raises(TokenizerError, match="chat_template"):
        start(chat_template="no/such/file", kv_cache_memory_bytes=1 << 20)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((tiny_model / "config.json").read_text())
    with pytest.raises(TokenizerError):
        start(model=str(tmp_path / "bare"))


def test_a_full_cache_serves_one_longest_request(tiny_model: Path) -> None:
    llm = LLM(
        str(tiny_model),
        load_format="dummy",
        device="cpu",
        num_threads=1,
        kv_cache_memory_bytes=4 * 16 * 1024,
        max_model_len=64,
    )
    [output] = llm.generate([[1] * 33], SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 64 - 33
    assert output.outputs[0].finish_reason == "length"


def test_a_small_step_budget_narrows_the_batch(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not an error that asks for a flag which the user never set; and what has no effect is said so."""
    logging.getLogger("quire").propagate = True
    with caplog.at_level(logging.WARNING, logger="quire"):
        llm = LLM(
            str(tiny_model),
            load_format="dummy",
            device="cpu",
            num_threads=1,
            kv_cache_memory_bytes=1 << 20,
            max_num_batched_tokens=8,
            gpu_memory_utilization=0.5,
        )
    assert llm.llm_engine.core.scheduler.config.max_num_seqs == 8
    assert "gpu_memory_utilization has no effect" in caplog.text
    assert len(llm.generate(["a"] * 20, SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)) == 20


def test_weights_that_no_memory_holds_are_told_in_numbers(tmp_path: Path) -> None:
    model = fakes.write_tiny_model(tmp_path, num_attention_heads=2**30, num_key_value_heads=2)
    with pytest.raises(MemoryBudgetError, match=r"weights take about .* GiB in float32"):
        LLM(model=str(model), load_format="dummy", device="cpu", dtype="float32")


@pytest.mark.parametrize("keep_kv", [False, True])
def test_a_sleeping_engine_answers_as_before_once_it_is_woken(tiny_model: Path, keep_kv: bool) -> None:
    llm = LLM(str(tiny_model), load_format="dummy", kv_cache_memory_bytes="4MiB", pinned_prefixes=(tuple(range(32)),))
    prompts = [{"prompt_token_ids": [*range(100 + i)]} for i in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    before = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    cache = llm.llm_engine.built.executor.executor.worker.cache
    for _ in range(2):
        llm.sleep(keep_kv=keep_kv)
        assert llm.is_sleeping()
        assert not cache.device_blocks.any(), "its memory is given back"
        with pytest.raises(BadRequestError, match="wake it up first"):
            llm.generate(prompts, params, use_tqdm=False)
        llm.wake_up()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == before
        assert outputs[0].num_cached_tokens == (96 if keep_kv else 32)  # what is pinned is kept anyway
        llm.llm_engine.core.kv.check()


def test_what_sleep_takes(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), load_format="dummy", kv_cache_memory_bytes="1MiB")
    for refused in (lambda: llm.sleep(2), lambda: llm.wake_up(["weights"])):
        with pytest.raises(BadRequestError):
            refused()
    llm.wake_up()  # it is awake: nothing happens
    assert not llm.is_sleeping()
    llm.llm_engine.add_request("running", {"prompt_token_ids": [1, 2]})
    with pytest.raises(BadRequestError, match="under way"):
        llm.sleep()
