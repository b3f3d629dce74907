"""Tools that others use: lm-eval's scores through the server are those without it, and what
schemathesis makes of the API's schema is answered as the schema says. They are in the extra `eval`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Server, Start
from tests.serve.fronts import running_front
from tilewright.llm import LLM

pytestmark = pytest.mark.slow

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: generate_until
doc_to_text: question
doc_to_target: answer
generation_kwargs: {{until: ["never said"], max_gen_toks: 12, temperature: 0, do_sample: false}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""
SMALL = ("--max-seats", "4", "--max-context", "512")
QUESTIONS = [f"Question {at}: what is {at} plus {at * 7}?" for at in range(12)]


def tool(name: str, variable: str) -> str:
    """The program, beside this Python or where the variable says."""
    beside = Path(sys.executable).with_name(name)
    found = os.environ.get(variable) or (str(beside) if beside.exists() else shutil.which(name))
    if found is None:
        pytest.skip(f"{name} is not installed; pip install '.[eval]', or name it in {variable}")
    return found


@pytest.fixture(scope="module")
def served(start_server: Start) -> Server:
    server = start_server(*("--target", "reference", "--precision", "accuracy"), *SMALL)
    assert server.process.poll() is None, server.log.read_text()
    return server


@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "completions"])
def test_lm_eval_scores_as_without_the_server(
    served: Server, tiny_gguf: Path, tmp_path: Path, is_chat: bool
) -> None:
    """Every third answer is expected to be another one, so a score of 2/3 needs all texts equal."""
    program = tool("lm_eval", "TILEWRIGHT_LM_EVAL")
    model = LLM(
        tiny_gguf, target="reference", precision="accuracy", max_context=512, use_cache=False
    )
    ask = model.chat if is_chat else model.generate
    answers = [ask(question, max_tokens=12).text for question in QUESTIONS]
    expected = [a if at % 3 else f"not {a}" for at, a in enumerate(answers)]
    docs = [{"question": q, "answer": a} for q, a in zip(QUESTIONS, expected, strict=True)]
    data = tmp_path / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    name = f"tilewright_{'chat' if is_chat else 'text'}"
    (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, data=data))
    kind, path = (
        ("local-chat-completions", "chat/completions")
        if is_chat
        else ("local-completions", "completions")
    )
    arguments = f"model=any,base_url={served.url}/v1/{path},num_concurrent=4,max_retries=1"
    arguments += ",tokenizer_backend=None,tokenized_requests=False"
    command = [program, "--model", kind, "--model_args", arguments, "--tasks", name]
    command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    command += ["--apply_chat_template"] if is_chat else []
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]
    (written,) = (tmp_path / "out").rglob("results*.json")
    scores: dict[str, Any] = json.loads(written.read_text())["results"][name]
    assert scores["exact_match,none"] == pytest.approx(8 / 12)


def test_what_schemathesis_makes_is_answered_as_the_schema_says(tmp_path: Path) -> None:
    program = tool("schemathesis", "TILEWRIGHT_SCHEMATHESIS")
    checks = "not_a_server_error,status_code_conformance,content_type_conformance"
    with running_front() as running:
        command = [program, "run", f"{running.url}/openapi.json", "--max-examples", "40"]
        command += ["--checks", f"{checks},response_schema_conformance", "--seed", "1"]
        command += ["--generation-database", "none", "--no-color"]
        found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
        assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
        assert running.front.client.num_restarts == 0
        assert running.ask("GET", "/health")[0] == 200
