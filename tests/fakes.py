"""A tiny model that needs no download: random weights from a config, and a byte-level tokenizer made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.engine.api import EngineInfo
    from quire.scheduler import Scheduler

TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": 257,
    "torch_dtype": "float32",
}

CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def draft_for_free(scheduler: Scheduler) -> None:
    """Whatever is guessed is verified: for tests in which it is not the question which drafts would pay."""
    from quire.step_costs import DraftCosts

    assert scheduler.drafter is not None
    free, draft = DraftCosts(1.0, 0.0, [512], [0.0]), scheduler.drafter.draft
    scheduler.costs.draft_costs = lambda num_decodes: free  # type: ignore[method-assign]
    scheduler.drafter.draft = lambda running, most, ends_together: draft(running, most)  # type: ignore[method-assign,assignment,misc]


def engine_info(**changes: Any) -> EngineInfo:
    """What an engine says of itself once it has started."""
    from quire.engine.api import EngineInfo

    told: dict[str, Any] = {
        "model": "tiny", "architecture": "LlamaForCausalLM", "device": "cpu", "dtype": "float32", "kv_dtype": "float32",
        "kernels": "none", "vocab_size": 320, "max_model_len": 256, "max_num_seqs": 16, "max_num_batched_tokens": 512,
        "block_size": 16, "num_blocks": 64, "num_host_blocks": 0, "block_bytes": 1024, "enable_prefix_caching": True,
        "ledger_summary": "memory: a little", "blocks_line": "# CPU blocks: 64", "ready_s": 0.0,
    }  # fmt: skip
    return EngineInfo(**(told | changes))


def write_model_with_margins(path: Path) -> Path:
    """Real files, for tests that compare devices: dummy weights differ by device. The spread makes margins clear."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    write_tiny_model(path)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**TINY_LLAMA, "initializer_range": 0.3})).save_pretrained(path)
    return path


def write_tiny_model(path: Path, **changes: Any) -> Path:
    """A directory with config.json and a tokenizer, for load_format='dummy'."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(TINY_LLAMA | changes))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|start|>",
                "eos_token": "<|end|>",
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )
    return path
