from __future__ import annotations

from pathlib import Path

import fakes
import pytest

from benchmarks import sends


def test_each_prompt_is_a_line_and_what_leaves_with_its_step_is_not_left_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = fakes.write_tiny_model(tmp_path / "model", num_hidden_layers=8, max_position_embeddings=5000)
    settings = '{"load_format": "dummy", "num_threads": 1, "max_num_batched_tokens": 256}'
    assert sends.main(["--model", str(model), "--tokens", "200", "400", "--rounds", "1", "--kwargs", settings]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[-4:]]
    assert [line[0] for line in lines] == ["200", "200", "400", "400"]
    of_layer = 2 * 2 * 16 * 32 * 4  # keys and values, heads, tokens, elements, bytes
    for line, num_blocks in zip(lines, (12, 12, 25, 25), strict=True):
        *_, num_mb, left_mb, share, _, _ = map(float, line[-6:])
        assert num_mb == round(num_blocks * 8 * of_layer / 1e6, 1)
        assert left_mb <= num_mb and abs(share - 100 * left_mb / num_mb) < 12
    behind = [float(line[-3]) for line in lines[::2]]
    assert behind[0] == 100.0  # one chunk, whose blocks leave after its step
    assert 35.9 < behind[1] <= 100.0  # at least the last chunk's; a busy machine may not have sent the first one's yet


def test_a_bad_model_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sends.main(["--model", str(tmp_path / "none")]) == 2
    assert "error" in capsys.readouterr().err
