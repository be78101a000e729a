from __future__ import annotations

import pytest

from quire.errors import DownloadError
from quire.weights.hub_gguf import choose_gguf

QWEN = [f"qwen2.5-0.5b-instruct-{q}.gguf" for q in ("fp16", "q2_k", "q4_0", "q4_k_m", "q8_0")]
BARTOWSKI = [
    "README.md",
    "Llama-3.2-1B-Instruct-IQ4_XS.gguf",
    "Llama-3.2-1B-Instruct-Q4_K_L.gguf",
    "Llama-3.2-1B-Instruct-Q4_K_M.gguf",
    "Llama-3.2-1B-Instruct-Q8_0.gguf",
    "mmproj-Q4_K_M.gguf",
    "imatrix.gguf",
    "BF16/Llama-3.2-1B-Instruct-BF16-00001-of-00002.gguf",
    "BF16/Llama-3.2-1B-Instruct-BF16-00002-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("names", "wanted", "chosen"),
    [
        (QWEN, "Q4_K_M", "qwen2.5-0.5b-instruct-q4_k_m.gguf"),
        (QWEN, "q8_0", "qwen2.5-0.5b-instruct-q8_0.gguf"),
        (QWEN, None, "qwen2.5-0.5b-instruct-q4_k_m.gguf"),
        (QWEN, "qwen2.5-0.5b-instruct-q2_k.gguf", "qwen2.5-0.5b-instruct-q2_k.gguf"),
        (QWEN[:3], None, "qwen2.5-0.5b-instruct-fp16.gguf"),
        (BARTOWSKI, None, "Llama-3.2-1B-Instruct-Q4_K_M.gguf"),
        (BARTOWSKI, "Q4_K_M", "Llama-3.2-1B-Instruct-Q4_K_M.gguf"),
        (["Meta-Llama-3-8B.Q5_K_M.gguf"], "q5_k_m", "Meta-Llama-3-8B.Q5_K_M.gguf"),
        (["Q6_K/model.gguf"], "Q6_K", "Q6_K/model.gguf"),
        (["a-IQ2_M.gguf", "b-Q8_0.gguf"], None, "b-Q8_0.gguf"),
    ],
)
def test_the_file_that_is_meant(names, wanted, chosen):
    assert choose_gguf(names, wanted, "owner/name") == chosen


@pytest.mark.parametrize(
    ("names", "wanted", "says"),
    [
        ([], None, "neither safetensors nor GGUF"),
        (["pytorch_model.bin"], "Q4_K_M", "neither safetensors nor GGUF"),
        (QWEN, "Q4_K", "no GGUF file that is quantized as Q4_K: use owner/name:qwen2.5-0.5b-instruct-fp16.gguf, "),
        (QWEN, "other.gguf", "no file 'other.gguf'"),
        (BARTOWSKI, "NVFP4", "quantized in a way that Quire does not read"),
        (BARTOWSKI, "BF16", "is a part of a file.*--merge"),
        (
            ["a-Q8_0.gguf", "b-Q8_0.gguf"],
            "Q8_0",
            "2 files for Q8_0: use owner/name:a-Q8_0.gguf, owner/name:b-Q8_0.gguf",
        ),
        ([f"m{i}-Q2_K.gguf" for i in range(30)], "Q8_0", "or one of 18 more"),
    ],
)
def test_refusals_name_what_there_is(names, wanted, says):
    with pytest.raises(DownloadError, match=says):
        choose_gguf(names, wanted, "owner/name")
