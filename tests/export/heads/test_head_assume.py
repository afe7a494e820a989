"""What a user may say with --assume, and what becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from click.testing import CliRunner
from dialects import Written

from eagle3 import cli
from eagle3.export.heads.assume import parse_assumptions
from eagle3.export.heads.head_config import TargetSizes
from eagle3.export.heads.reader import read_head
from eagle3.runtime.bundle.describe import description_lines
from eagle3.runtime.errors import CheckpointError

FACTS = TargetSizes(hidden_size=tiny.HIDDEN, vocab_size=64, num_layers=2)


def test_keys_and_values() -> None:
    given = ["d2t=absolute", "rope_theta=1e6", "ignore=a,b", "d2t=absolute"]
    assert parse_assumptions(given) == {"d2t": "absolute", "rope_theta": "1e6", "ignore": "a,b"}
    assert parse_assumptions([]) == {}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["d2t"], "'d2t' is no KEY=VALUE; the keys are dialect, layer_ids, d2t"),
        (["rope=3"], "unknown key 'rope'; the keys are dialect"),
        (["=3"], "unknown key ''"),
        (["d2t=both"], "d2t is 'both', not offsets or absolute"),
        (["norm_output=True"], "norm_output is 'True', not true or false"),
        (["head_dim=-8"], "head_dim is '-8', not a positive integer"),
        (["rope_theta=big"], "rope_theta is 'big', not a number"),
        (["ignore="], "ignore is '', not names"),
        (["d2t=offsets", "d2t=absolute"], "d2t is given twice, as 'offsets' and as 'absolute'"),
    ],
)
def test_what_is_refused(given: list[str], says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_assumptions(given)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("assume", "says"),
    [
        ({"head_dim": "0"}, "head_dim as a positive integer, found 0"),
        ({"rope_theta": "-1"}, "rope_theta -1.0; a number above 0"),
        ({"rms_norm_eps": "nan"}, "rms_norm_eps nan; a number above 0"),
        ({"bias": "true"}, "--assume bias=true: nothing in this head (specforge) depends on it"),
        ({"layer_ids": "inputs", "ignore": "eagle_config"}, "--assume layer_ids=inputs: nothing"),
        ({"lm_head": "own"}, "--assume lm_head=own: nothing"),
        ({"ignore": "no_such,rope_theta"}, "the head's config has no no_such"),
    ],
)
def test_what_does_not_fit_the_head(
    llama: Any, tmp_path: Path, assume: dict[str, str], says: str
) -> None:
    """Nothing is dropped in silence, also no word of the user."""
    head = Written("specforge").save(tmp_path, llama)
    with pytest.raises(CheckpointError) as caught:
        read_head(head, TargetSizes(tiny.HIDDEN, 64, num_layers=8), None, assume)
    assert says in str(caught.value)


def test_an_ignored_key_counts_as_absent(llama: Any, tmp_path: Path) -> None:
    head = Written("specforge", norm_output=True).save(tmp_path, llama)
    config = read_head(head, FACTS, None, {"ignore": "norm_output"}).config
    assert not config.norm_output
    assert config.conventions["norm_output"].source == "dialect default"


@pytest.fixture(scope="module")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = tiny.tiny_model("llama", num_layers=2, scale=2.0)
    return model, tiny.save_target(tmp_path_factory.mktemp("target"), model)


def test_the_command_line_says_it_and_the_bundle_remembers(
    small_target: tuple[Any, Path], tmp_path: Path
) -> None:
    model, target = small_target
    head = Written("specforge", norm_output=True, embedding="random").save(tmp_path / "h", model)
    command = ["export", "--target", str(target), "--draft", str(head), "-o", str(tmp_path / "b")]
    command += ["--max-seq-len", "128", "--prefill-chunk", "16"]

    result = CliRunner().invoke(cli.main, command)
    assert result.exit_code == 1 and "--assume norm_output=" in result.output

    without = [*command[:4], "none", *command[5:], "--assume", "norm_output=true"]
    result = CliRunner().invoke(cli.main, without)
    assert result.exit_code == 1 and "there is none" in result.output

    result = CliRunner().invoke(cli.main, [*command, "--assume", "norm_ouput=true"])
    assert result.exit_code == 1 and "unknown key 'norm_ouput'; the keys are" in result.output

    said = ["--assume", "norm_output=true", "--assume", "embedding=own"]
    result = CliRunner().invoke(cli.main, [*command, *said])
    assert result.exit_code == 0, result.output
    from eagle3.runtime.bundle.folder import Bundle

    bundle = Bundle.open(tmp_path / "b")
    assert "--assume norm_output=true --assume embedding=own" in bundle.manifest.command
    assert bundle.manifest.draft is not None
    conventions = bundle.manifest.draft.conventions
    assert conventions["norm_output"].source == conventions["embedding"].source == "flag"
    lines = "\n".join(description_lines(bundle))
    for text in (
        "dialect = specforge (from: config (architectures))",
        "norm_output = True (from: flag)",
        "embedding = the head's own; it differs from the target's (from: flag)",
        "rope = rope_type default, rope_theta 10000.0 (from: config)",
        "norm_before_residual = False (from: dialect default)",
        "head_dim = 8 (from: dialect default)",
    ):
        assert text in lines
