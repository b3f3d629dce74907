"""The text of engine.py: made of the typed program, needs nothing of ours, reads well."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tiny import QWEN2, lowered, tiny_model
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.cuda.engine_generator.layers import engine_plan
from tilewright.compiler.targets.cuda.engine_generator.parts import generated
from tilewright.compiler.targets.cuda.engine_generator.parts.plan import Choices, Norm, Plan
from tilewright.compiler.targets.cuda.engine_generator.write import engine_text
from tilewright.compiler.targets.cuda.lowering import lower_to_program
from tilewright.errors import CompileError


def test_the_plan_beside_the_parts_is_a_llamas(plan: Plan) -> None:
    assert plan == generated.PLAN
    assert Choices() == generated.CHOICES


def test_norms_apart_are_instructions_of_their_own(plan: Plan) -> None:
    graph, _ = lowered(
        tiny_model(tie_embeddings=False),
        target="cuda",
        until="fuse_norm_linear",
        precision=load_precision("reference"),
    )
    apart = engine_plan(lower_to_program(graph))
    norms = [each for each in (*apart.layer, *apart.last) if isinstance(each, Norm)]
    assert [each.weight for each in norms] == [
        *("input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight")
    ]
    assert not any(getattr(each, "norm", "") for each in (*apart.layer, *apart.last))


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ("q_proj_k_proj_v_proj: no instruction", QWEN2),
        ("NormHeads: no instruction", {"model_type": "qwen3", "qk_norm": True}),
    ],
)
def test_what_engines_have_not_is_refused(said: str, changes: dict[str, object]) -> None:
    graph, _ = lowered(tiny_model(**changes), target="cuda")
    with pytest.raises(CompileError, match=said):
        engine_plan(lower_to_program(graph))


@pytest.mark.parametrize("products", ["triton", "cuda"])
def test_the_file_is_short_formatted_and_imports_torch_and_triton_alone(
    products: str, plan: Plan, tmp_path: Path
) -> None:
    text = engine_text(plan, Choices(products=products), title="a test", num_layers=2)
    engine_file = tmp_path / "engine.py"
    engine_file.write_text(text, encoding="utf-8")
    assert len(text.splitlines()) < 2500
    assert ("griddepcontrol" in text) == (products == "cuda") != ("def product_kernel" in text)
    assert "tilewright" not in text
    found = {
        (each.module if isinstance(each, ast.ImportFrom) else each.names[0].name) or ""
        for each in ast.walk(ast.parse(text))
        if isinstance(each, ast.Import | ast.ImportFrom)
    }
    others = {name.partition(".")[0] for name in found} - sys.stdlib_module_names
    assert others == {"torch", "triton"}
    ruff = [sys.executable, "-m", "ruff"]
    for how in (["format", "--check"], ["check", "--select", "E,F,I,B", "--ignore", "E501"]):
        ran = subprocess.run(
            [*ruff, *how, "--isolated", "--line-length", "100", engine_file],
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stdout


def test_it_runs_where_nothing_of_this_project_is_installed(
    engine_file: Path, tmp_path: Path
) -> None:
    """No ``.pth`` file is read there, so that only torch's own folder is seen."""
    packages = Path(torch.__file__).parents[1]
    script = (
        "import sys, runpy, importlib.util as u\n"
        f"sys.path.append({str(packages)!r})\n"
        "assert u.find_spec('tilewright') is None\n"
        f"sys.argv = ['engine.py', '--self-test', '--device', 'cpu', '--operations', '8']\n"
        f"runpy.run_path({str(engine_file)!r}, run_name='__main__')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"OMP_NUM_THREADS": "1"},
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("ok: 8 calls, worst error 0.00")


def test_choices_are_written_where_they_differ(plan: Plan) -> None:
    text = engine_text(plan, Choices(outputs=32, chained=False), title="x", num_layers=2)
    assert "\nCHOICES = Choices(chained=False, outputs=32)\n" in text
