"""``python -m bench reference``: a model's fp32 reference file, for the repository."""

from __future__ import annotations

from tilewright.options.arguments import Parser


def main(argv: list[str]) -> int:
    """Run ``python -m bench reference`` with its arguments and return the exit code."""
    parser = Parser(prog="python -m bench reference", description="Write a fp32 reference file.")
    parser.add_argument("--model", metavar="PATH", help="as for tilewright run (default: smollm2)")
    arguments = parser.parse_args(argv)
    from tilewright.models import check_header, find_model

    path = find_model(arguments.model)
    check_header(path)
    from tilewright.cli.measure.measure import compile_reference, subject_of
    from tilewright.cli.terminal.console import compile_progress, err
    from tilewright.evaluate.cases.reference import (
        build_reference,
        reference_bytes,
        reference_path,
    )
    from tilewright.loading.source import source_of
    from tilewright.models import load_model
    from tilewright.utils.files import write_file

    model = load_model(path)
    subject, tokens = subject_of(source_of(model, path))
    with compile_progress(err()) as progress:
        executable = compile_reference(model, progress)
    reference, _ = build_reference(executable, subject, tokens)
    target = reference_path(model.name)
    write_file(target, reference_bytes(reference))
    print(f"{target}: {reference.id}")
    return 0
