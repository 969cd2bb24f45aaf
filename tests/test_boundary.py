"""Who means what by a layer id: conventions, the published lists, and every declaration that must be refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minieagle.spec.boundary import (
    BoundaryError,
    Convention,
    default_inputs,
    default_outputs,
    from_inputs,
    from_outputs,
    parse_capture,
)

IDS = "eagle_aux_hidden_state_layer_ids"
LAYERS = st.integers(1, 100)


@st.composite
def captures(draw: st.DrawFn) -> tuple[list[int], int]:
    num_layers = draw(LAYERS)
    return sorted(draw(st.sets(st.integers(0, num_layers), min_size=1, max_size=5))), num_layers


@given(captures())
def test_both_conventions_name_the_same_boundaries(capture: tuple[list[int], int]) -> None:
    boundaries, layers = capture
    assert from_inputs(boundaries, layers) == tuple(boundaries)
    assert from_outputs([b - 1 for b in boundaries], layers) == tuple(boundaries)


@given(captures(), st.sampled_from(["in", "out"]), st.sampled_from(["nested", "top", "both"]))
def test_every_boundary_is_reachable_from_a_config(
    capture: tuple[list[int], int], convention: Convention, place: str
) -> None:
    boundaries, layers = capture
    ids = boundaries if convention == "in" else [b - 1 for b in boundaries]
    nested = {"eagle_config": {IDS: ids}} if place != "top" else {}
    config = nested | ({IDS: ids} if place != "nested" else {})
    assert parse_capture(config, layers, len(ids), convention=convention).boundaries == tuple(boundaries)


@given(captures(), st.booleans())
def test_own_config_states_boundaries_in_the_order_of_fusion(capture: tuple[list[int], int], turned: bool) -> None:
    boundaries, layers = capture[0][::-1] if turned else capture[0], capture[1]
    assert parse_capture({"boundaries": boundaries}, layers, len(boundaries)).boundaries == tuple(boundaries)


@given(captures(), st.sampled_from([{}, {IDS: [1, 2, 3]}]))
def test_the_user_s_boundaries_win(capture: tuple[list[int], int], config: dict[str, object]) -> None:
    boundaries, layers = capture
    assert parse_capture(config, layers, len(boundaries), boundaries=boundaries).boundaries == tuple(boundaries)


def test_the_user_s_boundaries_are_noted_where_the_config_lists_others() -> None:
    listed: dict[str, object] = {IDS: [1, 3, 5]}
    assert parse_capture(listed, 8, 3, boundaries=[2, 4, 6]).note is None
    assert "neither reading" in (parse_capture(listed, 8, 3, boundaries=[1, 4, 6]).note or "")


# facts about who wrote which list: None is a list that is undecidable from the config alone
PUBLISHED: dict[str, tuple[list[int], int, tuple[int, ...] | None]] = {
    "SpecForge deepseek-v3-671b": ([1, 29, 57], 61, (2, 30, 58)),
    "lightseek kimi-k2.5-eagle3-mla for vLLM": ([2, 30, 58], 61, (2, 30, 58)),
    "SpecForge gpt-oss-120b": ([1, 17, 33], 36, None),
    "nvidia gpt-oss-120b-Eagle3-long-context": ([1, 17, 32], 36, (2, 18, 33)),
    "nvidia gpt-oss-120b-Eagle3-v3": ([24, 30, 36], 36, (24, 30, 36)),
    "SpecForge qwen3-235b": ([1, 46, 90], 94, (2, 47, 91)),
    "nvidia Llama-4-Maverick": ([1, 23, 44], 48, (2, 24, 45)),
    "AQ-MedAI DeepSeek-V4-Flash": ([1, 21, 40], 43, None),
    "a qwen3-235b drafter of four taps": ([2, 46, 91, 93], 94, None),
    "-1 in a list": ([-1, 3], 5, (0, 4)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_lists_parse_or_are_undecidable(name: str) -> None:
    ids, layers, boundaries = PUBLISHED[name]
    config: dict[str, object] = {"eagle_config": {IDS: ids}}
    if boundaries is not None:
        assert parse_capture(config, layers, len(ids)).boundaries == boundaries
    else:
        with pytest.raises(BoundaryError, match="--capture-convention in or out, or --boundaries, or .*doctor"):
            parse_capture(config, layers, len(ids))


@pytest.mark.parametrize(
    ("name", "convention", "boundaries"),
    [
        ("SpecForge gpt-oss-120b", "out", (2, 18, 34)),
        ("AQ-MedAI DeepSeek-V4-Flash", "in", (1, 21, 40)),
        ("a qwen3-235b drafter of four taps", "in", (2, 46, 91, 93)),
        ("SpecForge deepseek-v3-671b", "in", (1, 29, 57)),  # the user knows better than a resemblance
    ],
)
def test_published_lists_with_a_convention(name: str, convention: Convention, boundaries: tuple[int, ...]) -> None:
    ids, layers, _ = PUBLISHED[name]
    assert parse_capture({IDS: ids}, layers, len(ids), convention=convention).boundaries == boundaries


@given(captures())
def test_a_list_without_convention_is_read_by_a_rule_or_refused(capture: tuple[list[int], int]) -> None:
    ids, layers = capture
    known = {tuple(default_inputs(layers)): tuple(ids), tuple(default_outputs(layers)): tuple(i + 1 for i in ids)}
    if ids[-1] == layers:
        assert parse_capture({IDS: ids}, layers, len(ids)).boundaries == tuple(ids)
    elif tuple(ids) in known:
        assert parse_capture({IDS: ids}, layers, len(ids)).boundaries == known[tuple(ids)]
    else:
        with pytest.raises(BoundaryError, match="--capture-convention in or out"):
            parse_capture({IDS: ids}, layers, len(ids))


@given(st.integers(7, 200))
def test_the_defaults_are_one_triple(layers: int) -> None:
    read = [parse_capture({IDS: ids(layers)}, layers, 3) for ids in (default_inputs, default_outputs)]
    assert read[0].boundaries == read[1].boundaries == (2, layers // 2, layers - 3)
    assert all("--capture-convention" in (capture.note or "") for capture in read)


def test_a_format_defines_its_ids_and_a_resemblance_to_the_other_reading_is_noted() -> None:
    read = parse_capture({IDS: [1, 23, 44]}, 48, 3, stated=("in", "so speculators defines them"))
    assert read.boundaries == (1, 23, 44) and "which mean outputs" in (read.note or "")
    assert parse_capture({IDS: [2, 24, 45]}, 48, 3, stated=("in", "so speculators defines them")).note is None


@pytest.mark.parametrize(
    ("config", "convention", "named"),
    [
        ({}, "in", "names no states"),
        ({IDS: None, "eagle_config": None}, "in", "names no states"),
        ({"eagle_config": {}}, "in", "names no states"),
        ({"eagle_config": [1, 2, 3]}, "in", "eagle_config is"),
        ({IDS: [1, 2, 4], "eagle_config": {IDS: [2, 3, 5]}}, "in", "twice"),
        ({IDS: [1, 2, 4], "boundaries": [1, 2, 4]}, None, "twice"),
        ({}, None, "--boundaries 2 4 5 is EAGLE"),
        ({"boundaries": [1, 2, 4]}, "in", "drop convention='in'"),
        ({"boundaries": [1, 2, 9]}, None, r"9 is outside 0\.\.8"),
        ({IDS: [1, 2, 9]}, "in", r"9 is outside 0\.\.8"),
        ({IDS: [1, 2, 8]}, "out", r"8 is outside -1\.\.7"),
        ({IDS: [-1, 2, 4]}, "in", "-1 is outside"),
        ({IDS: [-2, 2, 4]}, "out", "-2 is outside"),
        ({IDS: [-1, 2, 8]}, None, "-1 is outside"),
        ({IDS: [4, 2, 1]}, "in", "ascending"),
        ({"boundaries": [1, 2, 2]}, None, "ascending"),
        ({IDS: [1, 2, 2]}, "out", "ascending"),
        ({IDS: [1, 2]}, "in", "names 2 states.*reads 3"),
        ({IDS: [1, 2, 3, 4]}, "in", "names 4 states.*reads 3"),
        ({IDS: [1, 2, True]}, "in", "list of integers"),
        ({IDS: [1, 2, 4.0]}, "in", "list of integers"),
        ({IDS: "124"}, "in", "list of integers"),
        ({IDS: []}, "in", "non-empty"),
        ({IDS: [1, 2, 4]}, "input", "convention is 'input'"),
    ],
)
def test_refusals_name_what_is_wrong(config: dict[str, object], convention: Convention, named: str) -> None:
    with pytest.raises(BoundaryError, match=named):
        parse_capture(config, 8, 3, convention=convention)


@pytest.mark.parametrize(
    ("config", "options", "named"),
    [
        ({IDS: [1, 2, 4]}, {"boundaries": [2, 3], "convention": None}, "names 2 states.*reads 3"),
        ({IDS: [1, 2, 4]}, {"boundaries": [2, 3, 5], "convention": "out"}, "pass one of them"),
        ({IDS: [1, 2, 4]}, {"boundaries": [2, 3, 9]}, r"9 is outside 0\.\.8"),
        ({IDS: [1, 2, 4]}, {"boundaries": [5, 3, 2]}, "ascending"),
        ({"boundaries": [1, 2, 4]}, {"boundaries": [2, 3, 5]}, r"\[1, 2, 4\] itself, and \[2, 3, 5\] were passed"),
    ],
)
def test_what_the_user_says_is_checked(config: dict[str, object], options: dict[str, Any], named: str) -> None:
    with pytest.raises(BoundaryError, match=named):
        parse_capture(config, 8, 3, **options)


@given(captures(), st.permutations(range(5)))
def test_order_is_never_repaired(capture: tuple[list[int], int], order: list[int]) -> None:
    ids, layers = capture
    shuffled = [ids[i] for i in order if i < len(ids)]
    if shuffled != ids:
        with pytest.raises(BoundaryError, match="ascending"):
            from_inputs(shuffled, layers)
