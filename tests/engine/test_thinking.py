"""A thought before the answer: grammars wait for its end, and a budget closes it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import fakes
import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.errors import BadRequestError

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if enable_thinking %}<think>\n{% endif %}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    model = fakes.write_tiny_model(tmp_path_factory.mktemp("thinking"))
    return make(model)


def make(model: Path, **fields: Any) -> LLM:
    settings: dict[str, Any] = {"chat_template": TEMPLATE, "kv_cache_memory_bytes": 4 << 20, "num_threads": 1} | fields
    return LLM(model=str(model), load_format="dummy", device="cpu", dtype="float32", seed=2, **settings)


def answer(llm: LLM, thinking: bool | None, **fields: Any) -> str:
    params = SamplingParams(**{"max_tokens": 120, "temperature": 1.0, "seed": 3, **fields})
    switches = {} if thinking is None else {"enable_thinking": thinking}
    (output,) = llm.chat(USER, params, use_tqdm=False, chat_template_kwargs=switches)
    return output.outputs[0].text


def test_a_budget_closes_the_thought(llm: LLM) -> None:
    for budget in (0, 1, 7):
        text = answer(llm, True, thinking_token_budget=budget, ignore_eos=True)
        thought, _, rest = text.partition("\n</think>\n\n")
        assert len(thought.encode()) <= 3 * budget and rest
    assert "</think>" not in answer(llm, True, ignore_eos=True)
    assert answer(llm, False, thinking_token_budget=3) == answer(llm, False)


def test_a_grammar_begins_after_the_thought(llm: LLM) -> None:
    wanted = StructuredOutputsParams(json={"enum": ["yes", "no"]})
    for n in (1, 2):
        text = answer(llm, True, thinking_token_budget=5, structured_outputs=wanted, n=n)
        assert json.loads(text.partition("</think>\n\n")[2]) in ("yes", "no")
    assert json.loads(answer(llm, False, structured_outputs=wanted)) in ("yes", "no")


def test_a_thought_that_the_model_begins_itself(llm: LLM) -> None:
    """The marker is many tokens here: a thought is found all the same, but not allowed before a grammar."""
    tokenizer = llm.get_tokenizer()
    for token in tokenizer.encode("<think>", add_special_tokens=False):
        assert isinstance(token, int)
    text = answer(llm, None, structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    assert re.fullmatch("a|b", text)


def test_stages_by_tokens() -> None:
    from quire.grammar.constraint import Constraint
    from quire.params import ThinkingSpec

    spec = ThinkingSpec(
        is_open=False, begin="<t>", end="</t>", begin_id=None, end_id=None, closing_ids=(90, 91), budget=3
    )
    constraint = Constraint(None, spec, bytes)
    constraint.advance(b" <t>ab")
    assert not constraint.forced()
    constraint.advance(b"c")
    assert constraint.forced() == [90, 91]
    copied = constraint.copy()
    constraint.advance([90, 91])
    assert constraint.is_over and not copied.is_over
    other = Constraint(None, spec, bytes)
    other.advance(b"<t>a</")
    assert other.forced() == [90, 91]  # three tokens of thinking, of which the last two begin the marker
    plain = Constraint(None, spec, bytes)
    plain.advance(b"no thought")
    assert plain.is_over


def test_without_marks_of_thoughts_it_is_refused(tiny_model: Path) -> None:
    llm = make(tiny_model, chat_template=None)
    with pytest.raises(BadRequestError, match="thinking_token_budget"):
        llm.generate("a", SamplingParams(thinking_token_budget=3), use_tqdm=False)
