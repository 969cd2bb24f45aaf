"""Who means what by a layer id: conventions, the published lists, and every declaration that must be refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minieagle.spec.boundary import BoundaryError, Convention, from_inputs, from_outputs, parse_capture

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
    assert parse_capture(config, layers, len(ids), convention) == tuple(boundaries)


@given(captures())
def test_own_config_states_boundaries(capture: tuple[list[int], int]) -> None:
    boundaries, layers = capture
    assert parse_capture({"boundaries": boundaries}, layers, len(boundaries)) == tuple(boundaries)


@pytest.mark.parametrize(
    ("ids", "layers", "convention", "boundaries"),
    [
        ([1, 29, 57], 61, "out", (2, 30, 58)),  # SpecForge deepseek-v3-671b
        ([2, 30, 58], 61, "in", (2, 30, 58)),  # lightseek kimi-k2.5-eagle3-mla, exported for vLLM
        ([1, 17, 33], 36, "out", (2, 18, 34)),  # SpecForge gpt-oss-120b
        ([1, 17, 32], 36, "out", (2, 18, 33)),  # nvidia gpt-oss-120b-Eagle3-long-context
        ([24, 30, 36], 36, None, (24, 30, 36)),  # nvidia gpt-oss-120b-Eagle3-v3: 36 is legal as an input only
        ([1, 46, 90], 94, "out", (2, 47, 91)),  # SpecForge qwen3-235b
        ([1, 23, 44], 48, "out", (2, 24, 45)),  # nvidia Llama-4-Maverick
        ([2, 46, 91, 93], 94, "in", (2, 46, 91, 93)),  # a qwen3-235b drafter of four taps
        ([-1, 3], 5, None, (0, 4)),  # -1 is legal as an output only
    ],
)
def test_published_lists(
    ids: list[int], layers: int, convention: Convention | None, boundaries: tuple[int, ...]
) -> None:
    assert parse_capture({"eagle_config": {IDS: ids}}, layers, len(ids), convention) == boundaries


@given(captures())
def test_a_list_legal_in_both_readings_needs_a_convention(capture: tuple[list[int], int]) -> None:
    ids, layers = capture
    if ids[-1] == layers:
        assert parse_capture({IDS: ids}, layers, len(ids)) == tuple(ids)
    else:
        with pytest.raises(BoundaryError, match="pass convention='out'"):
            parse_capture({IDS: ids}, layers, len(ids))


@pytest.mark.parametrize(
    ("config", "convention", "named"),
    [
        ({}, "in", "names no states"),
        ({IDS: None, "eagle_config": None}, "in", "names no states"),
        ({"eagle_config": {}}, "in", "names no states"),
        ({"eagle_config": [1, 2, 3]}, "in", "eagle_config is"),
        ({IDS: [1, 2, 4], "eagle_config": {IDS: [2, 3, 5]}}, "in", "twice"),
        ({IDS: [1, 2, 4], "boundaries": [1, 2, 4]}, None, "twice"),
        ({"boundaries": [1, 2, 4]}, "in", "drop convention='in'"),
        ({"boundaries": [1, 2, 9]}, None, r"9 is outside 0\.\.8"),
        ({IDS: [1, 2, 9]}, "in", r"9 is outside 0\.\.8"),
        ({IDS: [1, 2, 8]}, "out", r"8 is outside -1\.\.7"),
        ({IDS: [-1, 2, 4]}, "in", "-1 is outside"),
        ({IDS: [-2, 2, 4]}, "out", "-2 is outside"),
        ({IDS: [-1, 2, 8]}, None, "-1 is outside"),
        ({IDS: [4, 2, 1]}, "in", "ascending"),
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
        parse_capture(config, 8, 3, convention)


@given(captures(), st.permutations(range(5)))
def test_order_is_never_repaired(capture: tuple[list[int], int], order: list[int]) -> None:
    ids, layers = capture
    shuffled = [ids[i] for i in order if i < len(ids)]
    if shuffled != ids:
        with pytest.raises(BoundaryError, match="ascending"):
            from_inputs(shuffled, layers)
