"""The fit on the published tables: the rows it takes, the bars it meets, the constants kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bench.boards_fit.command import SPEEDS, is_kept, main, replace_source, wormhole_source
from bench.boards_fit.programs import Programs
from bench.boards_fit.report import Residual, Study, study_report, study_rows
from bench.boards_fit.wormhole import published_precision, read_rows
from tilewright.compiler.mesh import Mesh
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.tenstorrent.perf import constants
from tilewright.errors import ConfigError, TilewrightError
from tilewright.evaluate.report import perf_md
from tilewright.models.shapes import SHAPES

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def study() -> Study:
    document = perf_md.load(ROOT / SPEEDS)
    return study_rows(read_rows(document, Programs()))


def sizes(errors: Sequence[float]) -> tuple[float, float]:
    """Median and worst, percent."""
    found = 100 * np.abs(errors)
    return float(np.median(found)), float(np.max(found))


def test_the_rows_are_38_steps_and_34_prompts(study: Study) -> None:
    assert [len(study.decode), len(study.galaxy), len(study.prefill)] == [38, 10, 34]
    used = (*study.decode, *study.galaxy, *study.prefill)
    assert {each.sample.source for each in used} == {"performance", "accuracy"}
    assert not any("DP" in each.sample.device for each in used)
    assert {each.sample.device for each in study.galaxy} == {"TG"}


def test_steps_of_models_left_out(study: Study) -> None:
    median, worst = sizes([each.model for each in study.decode])
    assert median <= 5 and worst <= 20
    median, worst = sizes([each.family for each in study.decode])
    assert median <= 5 and worst <= 20


def test_steps_of_a_board_left_out(study: Study) -> None:
    def of(device: str) -> list[Residual]:
        return [each for each in study.decode if each.sample.device == device]

    assert sizes([each.board for each in of("T3K")])[0] <= 15
    assert {len(of("N150")), len(of("N300")), len(of("T3K"))} == {10, 14}


def test_precision_rows_keep_their_order(study: Study) -> None:
    assert sum(row.kind == "precision" for row in study.rows) == 12
    assert study.rank() >= 0.9


def test_prompts_of_models_left_out(study: Study) -> None:
    assert sizes([each.model for each in study.prefill])[0] <= 7.5


def test_a_model_left_out_is_left_out_on_every_board(study: Study) -> None:
    """Galaxy's rows of a model would otherwise tell of it."""
    small = [each for each in study.galaxy if each.sample.model == "Llama3.2-1B"]
    assert len(small) == 2 and all(abs(each.model) > abs(each.fitted) + 0.02 for each in small)


def test_the_constants_kept_are_those_of_the_fit(study: Study) -> None:
    path = Path(constants.__file__)
    assert is_kept(path, wormhole_source(study))
    assert not is_kept(path, wormhole_source(study).replace("0.", "1."))


def test_constants_are_written_between_their_marks(study: Study, tmp_path: Path) -> None:
    path = tmp_path / "constants.py"
    path.write_text("before = 1\n# fitted: begin\nold = 2\n# fitted: end\nafter = 3\n")
    replace_source(path, wormhole_source(study))
    text = path.read_text()
    assert text.startswith("before = 1\n# fitted: begin\nFITTED = Constants(\n")
    assert text.endswith("# fitted: end\nafter = 3\n") and "old" not in text
    path.write_text("nothing\n")
    with pytest.raises(ConfigError, match="no lines '# fitted: begin'"):
        replace_source(path, wormhole_source(study))


def test_the_report_has_rows_and_errors(study: Study) -> None:
    report = study_report(study)
    assert "| Llama3.1-70B" in report and "Rank correlation" in report


def test_a_mistake_is_one_line() -> None:
    with pytest.raises(TilewrightError):
        main(["--speeds", "nosuch.md"])


@pytest.mark.parametrize(
    "section, model, ff1_3, qkv_fidelity",
    [
        ("accuracy", "Phi3.5-mini", "bfp8", "hifi4"),
        ("performance", "Qwen2.5-7B", "bfp4", "hifi4"),
        ("accuracy", "Llama3.1-70B", "bfp4", "hifi2"),
        ("batch_32", "Llama3.1-8B", "bfp4", "hifi2"),
    ],
)
def test_configurations_of_published_rows(
    section: str, model: str, ff1_3: str, qkv_fidelity: str
) -> None:
    found = published_precision(section, model).resolve(1, model)
    assert (found.format("ff1_3"), found.format("wqkv")) == (ff1_3, "bfp8")
    assert found.fidelity("li_qkv", "decode") == qkv_fidelity
    assert (found.fidelity("li_ff1_3", "decode") == "lofi") == (ff1_3 == "bfp4")


def test_a_period_of_layers_counts_as_the_whole_model() -> None:
    sizes_ = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 512}
    config = {**SHAPES["tiny"], **sizes_, "num_hidden_layers": 3}
    given = {"board": "n300", "mesh": Mesh(2), "phase": "decode", "context": 64}
    precision = load_precision("performance")
    work = Programs().work(config, precision, model="tiny", **given)
    program, repeats = Programs().get(config, precision, model="tiny", **given)
    assert repeats == 3
    layer = [item for item in program.instructions if item.layer is not None]
    assert sum(count for _, count in work) == len(program.instructions) + 2 * len(layer)
