"""The one-line spelling: the published headings, the way back, and what is refused."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.compiler.formats import FIDELITIES
from tilewright.compiler.precision import OP_GROUPS, TENSOR_GROUPS, load_precision, parse_heading
from tilewright.compiler.precision.names import ALLOWED_FORMATS, GLOBAL_GROUPS
from tilewright.errors import ConfigError

HEADINGS = (Path(__file__).parents[1] / "goldens" / "seed_headings.txt").read_text().splitlines()
NUM_LAYERS = 6


@pytest.mark.parametrize("heading", HEADINGS)
def test_published_headings_come_back_character_for_character(heading: str) -> None:
    for num_layers in (1, 16, 80):
        assert parse_heading(heading).resolve(num_layers).heading() == heading
    assert load_precision(heading).resolve(4).id == parse_heading(heading).resolve(4).id


def test_there_are_twelve_of_them_and_yaml_expresses_them(tmp_path: Path) -> None:
    """The grid of ff1_3 and ff2, and the three with bfp4 output projections, from files."""
    fidelities = {"bfp4": "lofi", "bfp8": "hifi2", "bf16": "hifi4"}
    made = []
    for ff1_3, ff2 in product(fidelities, repeat=2):
        made.append(
            f"precision: {{ff1_3: {ff1_3}, ff2: {ff2}}}\n"
            f"fidelity: {{li_ff1_3: {fidelities[ff1_3]}, li_ff2: {fidelities[ff2]}}}\n"
        )
    for activation in ("bf16", "bfp8", "mixed"):
        made.append(
            f"precision: {{wo: bfp4, activation: {activation}}}\n"
            "fidelity: {li_o_decode: lofi, li_o_prefill: lofi}\n"
        )
    printed = []
    for number, text in enumerate(made):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        printed.append(load_precision(str(path)).resolve(16).heading())
    assert printed == HEADINGS
    assert len(set(HEADINGS)) == 12


def test_ours_appear_only_where_they_differ() -> None:
    config = parse_heading(
        "precision_cfg = {lm_head: bfp4, embedding: bf16}, fidelity_cfg = {li_ff2_prefill: hifi4}"
    )
    heading = config.resolve(2).heading()
    assert ", activation: mixed, lm_head: bfp4}, fidelity_cfg = {" in heading
    assert heading.endswith("sdpa_prefill: hifi4, li_ff2_prefill: hifi4}")
    assert "li_ff2: hifi2" in heading


def test_layers_and_axis_are_appended() -> None:
    layers = "layer_cfg = {0: {ff2: bf16}, 1: {ff2: bf16, li_ff2: hifi4}, *.o_proj: {wo: fp32}}"
    config = parse_heading(
        "precision_cfg = {}, layer_cfg = {0-1: {ff2: bf16}, 1: {li_ff2: hifi4},"
        " *.o_proj: {wo: fp32}}, block_axis = out"
    )
    assert config.resolve(5).heading().endswith(f", {layers}, block_axis = out")


def test_the_plain_part_is_what_most_layers_have() -> None:
    heading = parse_heading("layer_cfg = {1-3: {ff2: bf16}}").resolve(4).heading()
    assert ", ff2: bf16, " in heading
    assert heading.endswith(", layer_cfg = {0: {ff2: bfp8}}")


def test_white_space_and_order_of_sections_are_free() -> None:
    tight = parse_heading("fidelity_cfg={li_ff2:lofi},precision_cfg={ff2:bfp4}")
    wide = parse_heading(" precision_cfg  =  { ff2 : bfp4 } , fidelity_cfg = {\tLI_FF2: LOFI }  ")
    assert tight.resolve(3).id == wide.resolve(3).id


@pytest.mark.parametrize(
    ("heading", "message"),
    [
        ("precision_cfg = {ff3: bfp4}", r"heading: precision: unknown key 'ff3'; allowed: ff1_3,"),
        ("precision_cfg = {ff2: bfp5}", r"heading: precision: ff2 = 'bfp5'; allowed: fp32,"),
        ("fidelity_cfg = {li_ff2: bfp8}", r"li_ff2 = 'bfp8'; allowed: lofi, hifi2"),
        ("precision_cfg = {ff2: bfp4, ff2: bfp8}", "heading: ff2 is given twice; allowed: once"),
        ("precision_cfg = {ff2: bfp4, FF2: bfp8}", "ff2 is given twice; allowed: once"),
        ("precision_cfg = {}, precision_cfg = {}", "precision_cfg is given twice; allowed: once"),
        ("precision_cfg = {}, other_cfg = {}", "unknown section 'other_cfg'; allowed: precision_c"),
        ("precision_cfg = {ff2: bfp4", "heading: ends too early; allowed: "),
        ("precision_cfg = {ff2 bfp4}", "heading: found 'bfp4'; allowed: ':'"),
        ("precision_cfg = {ff2: }", "heading: found '}'; allowed: a value"),
        ("precision_cfg = {ff2: bfp4} fidelity_cfg = {}", "found 'fidelity_cfg'; allowed: ','"),
        ("precision_cfg = {} block_axis", "found 'block_axis'; allowed: ','"),
        ("block_axis = up", "heading: block_axis = 'up'; allowed: in, out"),
        ("layer_cfg = {3-1: {ff2: bf16}}", "layers.3-1: the range is empty; allowed: first-last"),
        ("layer_cfg = {1-2-3: {ff2: bf16}}", "layers.1-2-3: not a layer; allowed: an index"),
        ("layer_cfg = {0: {lm_head: bf16}}", "layers.0: lm_head is in no layer; allowed: "),
        ("block_axis = in" + " " * (1 << 20), r"heading of \d+ characters; allowed: up to"),
    ],
)
def test_refused(heading: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_heading(heading)
    assert "\n" not in str(caught.value)


@st.composite
def maps(draw: st.DrawFn, *, in_layer: bool) -> dict[str, str]:
    banned = GLOBAL_GROUPS if in_layer else ()
    groups = [group for group in TENSOR_GROUPS + OP_GROUPS if group not in banned]
    chosen = draw(st.lists(st.sampled_from(groups), unique=True, max_size=6))
    return {
        group: draw(st.sampled_from(ALLOWED_FORMATS.get(group, tuple(FIDELITIES))))
        for group in chosen
    }


@st.composite
def selectors(draw: st.DrawFn) -> str:
    first = draw(st.integers(0, NUM_LAYERS - 1))
    last = draw(st.integers(first, NUM_LAYERS - 1))
    span = str(first) if first == last else f"{first}-{last}"
    return draw(st.sampled_from([span, span, "*.mlp.*", "layers.[0-2].*", "*.experts.*"]))


@st.composite
def headings(draw: st.DrawFn) -> str:
    def render(settings: dict[str, str], allowed: tuple[str, ...]) -> str:
        inside = ", ".join(f"{k}: {v}" for k, v in settings.items() if k in allowed)
        return "{" + inside + "}"

    settings = draw(maps(in_layer=False))
    rules = draw(st.lists(st.tuples(selectors(), maps(in_layer=True)), max_size=4))
    layers = ", ".join(
        f"{selector}: {render(entry, TENSOR_GROUPS + OP_GROUPS)}" for selector, entry in rules
    )
    return (
        f"precision_cfg = {render(settings, TENSOR_GROUPS)},"
        f" fidelity_cfg = {render(settings, OP_GROUPS)}, layer_cfg = {{{layers}}},"
        f" block_axis = {draw(st.sampled_from(['in', 'out']))}"
    )


FQNS = (None, "layers.1.mlp.down_proj", "layers.5.self_attn.o_proj", "layers.2.mlp.experts.7")


@given(headings())
def test_every_heading_parses_back_to_the_same_settings(text: str) -> None:
    first = parse_heading(text).resolve(NUM_LAYERS)
    again = parse_heading(first.heading()).resolve(NUM_LAYERS)
    assert (again.id, again.heading()) == (first.id, first.heading())
    for layer, fqn, group in product((None, *range(NUM_LAYERS)), FQNS, TENSOR_GROUPS):
        if layer is None and group not in GLOBAL_GROUPS:
            continue
        assert again.format(group, layer=layer, fqn=fqn) == first.format(
            group, layer=layer, fqn=fqn
        )
    for layer, fqn, family in product(range(NUM_LAYERS), FQNS, ("li_ff1_3", "li_ff2", "sdpa")):
        for phase in ("prefill", "decode"):
            assert again.fidelity(family, phase, layer=layer, fqn=fqn) == first.fidelity(
                family, phase, layer=layer, fqn=fqn
            )


@given(st.text(alphabet="precision_cfg={}:, \nff2bp48-*", max_size=60))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    message = "allowed: "
    try:
        parse_heading("precision_cfg = " + text)
    except ConfigError as error:
        message = str(error)
    assert "allowed: " in message
