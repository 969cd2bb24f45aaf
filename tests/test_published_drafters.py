"""Every published drafter layout loads to the same numbers, and every mistake in one is refused by name: tensors under
foreign names, missing, unused, reshaped, quantised, not finite, at odds with the config; tables of target ids."""

import importlib.util
import logging
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from minieagle.models import drafter_names
from minieagle.models.checkpoint import CheckpointError
from minieagle.models.config import ConfigError
from minieagle.models.draft_vocabulary import target_ids
from minieagle.models.drafter_config import drafter_config
from minieagle.models.drafter_names import official_shapes
from minieagle.models.drafter_weights import drafter_shapes, drafter_tensors, load_drafter
from minieagle.models.eagle3 import Drafter
from minieagle.spec.train import rollout
from tests.drafter_oracle import BASE, LATENT, WIRINGS, YARN, Config, PlainDrafter, Shared, Tensors, save_drafter_files
from tests.drafter_oracle import drafter_tensors as random_tensors
from tests.strategies import SEEDS, tiny_target, tokens

CLOSE = 2e-4
NUM_SLOTS, NUM_STEPS = 8, 3
LAST = NUM_SLOTS - NUM_STEPS - 1
"""The last slot that the text goes on long enough for."""


def load(config: Config, tensors: Tensors, /, **options: Any) -> Drafter:
    with tempfile.TemporaryDirectory() as directory:
        return load_drafter(save_drafter_files(Path(directory), config, tensors), tiny_target(), **options)


def captured(config: Config, num_rows: int, seed: int = 0) -> Tensor:
    shape = (num_rows, len(config["boundaries"]), config["target_hidden_size"])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def drafted(drafter: Drafter, states: Tensor, text: Tensor) -> Tensor:
    """Logits of slot LAST at each draft step."""
    steps = list(rollout(drafter, text[None], drafter.fuse(states), NUM_STEPS))
    return torch.stack([logits[0, LAST] for logits in steps])


# ---- layouts, as their projects write them


def rename(tensors: Tensors, old: str, new: str) -> Tensors:
    return {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in tensors.items()}


def official(tensors: Tensors) -> Tensors:
    """yuhuili/EAGLE3-*, SpecForge."""
    return tensors


def speculators(tensors: Tensors) -> Tensors:
    """RedHatAI/*-speculator.eagle3: layers by their index."""
    return rename(tensors, "midlayer.", "layers.0.")


def in_wrapper(tensors: Tensors) -> Tensors:
    outside = ("lm_head.weight", "d2t", "t2d")
    return {name if name in outside else f"model.{name}": tensor for name, tensor in tensors.items()}


def wrapped(tensors: Tensors) -> Tensors:
    """Saved from a serving engine's or trainer's wrapper: all but head and tables under `model.`."""
    return in_wrapper(speculators(tensors))


def wrapped_midlayer(tensors: Tensors) -> Tensors:
    """The same of a wrapper around the official model."""
    return in_wrapper(official(tensors))


def without_t2d(tensors: Tensors) -> Tensors:
    """Exports for serving, which never reads t2d."""
    return {name: t for name, t in tensors.items() if name != "t2d"}


def with_buffers(tensors: Tensors) -> Tensors:
    """Older transformers saved the rotary frequencies."""
    return tensors | {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(8)}


def in_half(tensors: Tensors) -> Tensors:
    return {name: t.bfloat16().half() if t.is_floating_point() else t for name, t in tensors.items()}


def whole_vocabulary(tensors: Tensors) -> Tensors:
    """TorchSpec and vLLM's latent drafters of Kimi: no reduction, hence no table."""
    return {name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}


LAYOUTS: list[tuple[Callable[[Tensors], Tensors], str, Config]] = [
    (official, "plain", {}),
    (speculators, "plain", {"own_embeddings": True, "norm_before_residual": True}),
    (speculators, "three layers", {"fc_norm": True, "norm_output": True, "own_embeddings": True}),
    (speculators, "head norms", {"norm_before_fc": True}),
    (wrapped, "latent", {}),
    (wrapped, "three layers", {"own_embeddings": True}),
    (wrapped_midlayer, "plain", {"fc_norm": True}),
    (without_t2d, "plain", {}),
    (with_buffers, "plain", {}),
    (whole_vocabulary, "latent, halves, yarn", {"draft_vocab_size": 96}),
    (whole_vocabulary, "target's head", {}),
    (official, "another width", {}),
    (in_half, "plain", {}),
]


@pytest.mark.parametrize(("layout", "wiring", "changes"), LAYOUTS)
def test_every_published_layout_loads_right(
    layout: Callable[[Tensors], Tensors], wiring: str, changes: Config, tmp_path: Path
) -> None:
    config = BASE | WIRINGS[wiring] | changes
    tensors = random_tensors(config)
    save_file(layout(tensors), tmp_path / "model.safetensors")
    drafter = load_drafter(tmp_path, tiny_target(), config=drafter_config(config))
    kept = {name: t.bfloat16().float() for name, t in tensors.items()} if layout is in_half else tensors
    text, states = tokens(NUM_SLOTS, 0, 96), captured(config, NUM_SLOTS)
    plain = PlainDrafter(config, kept, Shared.of(tiny_target()))
    wanted = plain.run(text[1:].tolist(), states[: LAST + 1])[LAST:].float()
    torch.testing.assert_close(drafted(drafter, states, text), wanted, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("alias", range(len(drafter_names.ALIASES)))
def test_a_reader_without_one_of_the_aliases_refuses(alias: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tuple(rule for i, rule in enumerate(drafter_names.ALIASES) if i != alias)
    monkeypatch.setattr(drafter_names, "ALIASES", left)
    with pytest.raises(CheckpointError, match="missing"):
        load(BASE, wrapped(random_tensors(BASE)))


@pytest.mark.parametrize("wiring", WIRINGS)
def test_shapes_say_what_the_config_does(wiring: str) -> None:
    config = drafter_config(BASE | WIRINGS[wiring])
    told = drafter_shapes(official_shapes(config) | {"d2t": (config.draft_vocab_size,)})
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "draft_vocab_size", "fc_norm", "qk_norm"):
        assert getattr(told, name) == getattr(config, name)
    assert told.taps(config.target_hidden_size) == len(config.boundaries)
    assert told.latent == (config.latent is not None) and told.own_head == config.own_head


def test_shapes_name_a_fusion_of_another_target() -> None:
    told = drafter_shapes(official_shapes(drafter_config(BASE)))
    with pytest.raises(CheckpointError, match="192 numbers, no multiple of the target's hidden_size=80"):
        told.taps(80)


@pytest.mark.parametrize("wiring", WIRINGS)
def test_a_loaded_drafter_gives_its_tensors_back(wiring: str) -> None:
    config = BASE | WIRINGS[wiring]
    tensors = random_tensors(config)
    again = drafter_tensors(load(config, tensors))
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], tensors[name]) for name in tensors)


# ---- mistakes


Change = Callable[[Tensors], None]
WHOLE: Config = {"fc_norm": True, "own_embeddings": True, "qk_norm": True, "num_hidden_layers": 2}


def changed(changes: Config, change: Change, **options: Any) -> Drafter:
    config = BASE | changes
    tensors = random_tensors(config)
    change(tensors)
    return load(config, tensors, **options)


NAMES = sorted(official_shapes(drafter_config(BASE | WHOLE)))


@pytest.mark.parametrize("name", NAMES)
def test_a_dropped_tensor_is_named(name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        changed(WHOLE, lambda tensors: tensors.__delitem__(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_reshaped_tensor_is_named(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name} has shape"):
        changed(WHOLE, lambda tensors: tensors.update({name: tensors[name].unsqueeze(0)}))


@pytest.mark.parametrize("name", NAMES[::4])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_is_named(name: str, value: float) -> None:
    """What speculators fills embeddings and heads with that were never loaded."""

    def change(tensors: Tensors) -> None:
        tensors[name].view(-1)[-1] = value

    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinity"):
        changed(WHOLE, change)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantised_weights_are_refused(dtype: torch.dtype) -> None:
    name = "midlayer.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match=f"{name} is stored as {dtype}"):
        changed({}, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))


def test_all_faults_are_listed_at_once() -> None:
    def change(tensors: Tensors) -> None:
        del tensors["norm.weight"], tensors["midlayer.hidden_norm.weight"]
        tensors |= {"model.rotary.weight": torch.ones(2), "fc.bias": torch.ones(64)}

    with pytest.raises(CheckpointError) as error:
        changed({}, change)
    faults = ("norm.weight is missing", "hidden_norm.weight is missing", "model.rotary.weight has no", "fc.bias has no")
    assert all(fault in str(error.value) for fault in faults)


CONTRADICTIONS = [
    ("own_embeddings", "embed_tokens.weight"),
    ("own_head", "lm_head.weight"),
    ("fc_norm", "fc_norm.0.weight"),
    ("norm_before_fc", "input_norm.weight"),
    ("qk_norm", "midlayer.self_attn.q_norm.weight"),
]


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize(("flag", "tensor"), CONTRADICTIONS)
def test_a_flag_that_the_tensors_contradict_is_an_error_with_both(flag: str, tensor: str, said: bool) -> None:
    held = BASE | {"draft_vocab_size": 96, flag: not said}
    with pytest.raises(CheckpointError, match=rf"{flag}={str(said).lower()}, but its weights \w+( no)? {tensor}"):
        load(held | {flag: said}, random_tensors(held))


@pytest.mark.parametrize(("mine", "theirs"), [({}, {"latent": LATENT}), ({"latent": LATENT}, {})])
def test_one_attention_in_place_of_the_other_is_an_error(mine: Config, theirs: Config) -> None:
    with pytest.raises(CheckpointError, match="latent="):
        load(BASE | mine, random_tensors(BASE | theirs))


def test_two_names_of_one_tensor_are_an_error() -> None:
    name = "hidden_norm.weight"
    with pytest.raises(CheckpointError, match=f"layers.0.{name} and midlayer.{name}, two names"):
        changed({}, lambda tensors: tensors.update({f"layers.0.{name}": tensors[f"midlayer.{name}"].clone()}))


def test_what_is_no_drafter_is_said() -> None:
    with pytest.raises(CheckpointError, match="holds no EAGLE-3 drafter"):
        load(BASE, {"model.layers.0.self_attn.q_proj.weight": torch.ones(4, 4)})


def test_a_drafter_that_lacks_a_tensor_is_incomplete_and_what_has_no_place_is_named() -> None:
    gate = "midlayer.mlp.gate_proj.weight"
    with pytest.raises(CheckpointError, match="gate_proj.weight is missing: .*incomplete; without a place are gate.w"):
        changed({}, lambda tensors: tensors.update({"gate.w": tensors.pop(gate)}))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"vocab_size": 97}, "vocab_size"),
        ({"target_hidden_size": 32, "own_embeddings": True}, "target_hidden_size"),
        ({"boundaries": [0, 1, 4]}, r"boundaries=\[0, 1, 4\]"),
        ({"boundaries": [1, 1, 2]}, r"boundaries=\[1, 1, 2\]"),
        ({"boundaries": [0, 1, 2], "last_state": "post-norm"}, "speaks of boundary 3"),
    ],
)
def test_a_drafter_of_another_target_is_refused(wrong: Config, named: str) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=named):
        changed(wrong, lambda tensors: None)


# ---- sharing, dtype, length


@pytest.mark.parametrize("own", [True, False])
def test_embeddings_are_its_own_or_the_targets(own: bool) -> None:
    config = BASE | {"own_embeddings": own}
    tensors = random_tensors(config)
    embeddings = load(config, tensors).embed_tokens
    assert torch.equal(embeddings, tensors["embed_tokens.weight"] if own else tiny_target().embed_tokens)


def test_the_targets_weights_are_no_parameters_of_the_drafter() -> None:
    config = BASE | {"own_head": False, "draft_vocab_size": 96, "last_state": "post-norm"}
    mine = {p.data_ptr() for p in load(config, random_tensors(config)).parameters()}
    assert not mine & {p.data_ptr() for p in tiny_target().parameters()}


def test_a_drafter_in_another_dtype_than_its_target_runs() -> None:
    """States arrive in the target's dtype, and a shared head is asked in it."""
    config = BASE | WIRINGS["target's head"]
    drafter = load(config, random_tensors(config), dtype=torch.bfloat16)
    out = drafter.finish(drafter.fuse(captured(config, NUM_SLOTS)))
    assert out.states.dtype == torch.bfloat16 and out.logits.isfinite().all()


def test_positions_beyond_the_trained_length_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    config = drafter_config(BASE | {"max_position_embeddings": 64})
    tensors = random_tensors(BASE)
    with caplog.at_level(logging.WARNING):
        assert len(load(BASE, tensors, config=config, max_positions=64).rotary.cos) == 64
        assert not caplog.records
        assert len(load(BASE, tensors, config=config, max_positions=100).rotary.cos) == 100
    assert "trained on up to 64 positions" in caplog.text


def test_a_given_config_wins_over_the_file() -> None:
    tensors = random_tensors(BASE)
    drafter = load({"model_type": "llama"}, tensors, config=replace(drafter_config(BASE), norm_output=True))
    assert drafter.config.norm_output


# ---- the table of target ids


IDS = torch.tensor([0, 3, 4, 5, 9, 10, 11, 30])
FIRST = torch.arange(len(IDS))
OFFSETS = IDS - FIRST


def marks(ids: Tensor, vocab_size: int = 31) -> Tensor:
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)


def read(d2t: Tensor | None, t2d: Tensor | None, kind: str = "offset") -> list[int]:
    return target_ids(d2t, t2d, draft_vocab_size=len(IDS), vocab_size=31, kind=kind).tolist()


@pytest.mark.parametrize("t2d", [marks(IDS), marks(IDS).to(torch.int8), None], ids=["t2d", "t2d as int8", "no t2d"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_table_reads_as_its_kind(t2d: Tensor | None, dtype: torch.dtype) -> None:
    assert read(OFFSETS.to(dtype), t2d) == IDS.tolist()
    assert read(IDS.to(dtype), t2d, "absolute") == IDS.tolist()


@pytest.mark.parametrize("t2d", [marks(FIRST), None], ids=["t2d", "no t2d"])
@pytest.mark.parametrize("d2t", [FIRST, FIRST * 0, None], ids=["arange", "zeros", "no d2t"])
def test_the_identity_may_be_written_in_any_way_when_it_is_meant(d2t: Tensor | None, t2d: Tensor | None) -> None:
    assert read(d2t, t2d, "identity") == FIRST.tolist()


OTHER_KINDS = [
    (IDS, marks(IDS), "offset", "absolute"),
    (IDS, None, "offset", "absolute"),
    (OFFSETS, marks(IDS), "absolute", "offset"),
    (OFFSETS, None, "absolute", "offset"),
    (FIRST, marks(FIRST), "offset", "absolute"),
    (FIRST, None, "offset", "identity"),
    (FIRST * 0, None, "offset", "identity"),
    (OFFSETS, marks(IDS), "identity", "offset"),
    (None, None, "offset", "identity"),
]


@pytest.mark.parametrize(("d2t", "t2d", "kind", "other"), OTHER_KINDS)
def test_a_table_of_another_kind_is_refused_and_the_kind_named(
    d2t: Tensor | None, t2d: Tensor | None, kind: str, other: str
) -> None:
    with pytest.raises(CheckpointError, match=f'state "d2t": "{other}"'):
        read(d2t, t2d, kind)


BROKEN = [
    (OFFSETS.flip(0), marks(IDS), "ascend"),
    (OFFSETS + 1, marks(IDS), "outside 0..30"),
    (OFFSETS - 1, None, "names token -1"),
    (FIRST * 0, marks(IDS), "t2d marks 8"),
    (FIRST, marks(IDS), "t2d marks 8"),
    (IDS.flip(0) - FIRST, marks(IDS), "ascend"),
    (OFFSETS, marks(IDS[1:]), "t2d marks 7"),
    (OFFSETS[1:], None, "d2t has dtype"),
    (OFFSETS.float(), None, "d2t has dtype"),
    (OFFSETS, marks(IDS, 32), "t2d has dtype"),
]


@pytest.mark.parametrize(("d2t", "t2d", "named"), BROKEN)
def test_a_table_that_fits_no_kind_is_refused(d2t: Tensor, t2d: Tensor | None, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        read(d2t, t2d)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(CheckpointError, match="d2t='offsets' must be one of"):
        read(OFFSETS, None, "offsets")


def test_a_table_that_could_be_either_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert read(FIRST * 2 + 1, None) == (FIRST * 3 + 1).tolist()
    assert "could hold absolute ids" in caplog.text


@given(st.sets(st.integers(0, 95), min_size=1), SEEDS)
def test_offsets_name_the_kept_tokens(kept: set[int], seed: int) -> None:
    config = BASE | {"draft_vocab_size": len(kept)}
    tensors, ids = random_tensors(config, seed), torch.tensor(sorted(kept))
    tensors["d2t"], tensors["t2d"] = ids - torch.arange(len(ids)), marks(ids, 96)
    assert load(config, tensors).target_ids.tolist() == sorted(kept)


@pytest.mark.parametrize("stored", [True, False], ids=["SpecForge's zeros and ones", "no table"])
def test_a_whole_vocabulary_needs_no_table(stored: bool) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["d2t"], tensors["t2d"]
        if stored:
            tensors |= {"d2t": torch.zeros(96, dtype=torch.int64), "t2d": torch.ones(96, dtype=torch.bool)}

    assert changed({"draft_vocab_size": 96}, change).target_ids.tolist() == [*range(96)]


def test_the_loader_passes_the_kind_on() -> None:
    config = BASE
    ids = load(config, random_tensors(config)).target_ids
    absolute = changed({}, lambda tensors: tensors.update(d2t=ids.clone()), d2t="absolute")
    assert torch.equal(absolute.target_ids, ids)


# ---- a second opinion: the speculators package


@pytest.fixture(scope="module")
def eagle3() -> ModuleType:
    """speculators' own model. Its plain install pulls in torchvision, datasets and a transformers older than the target
    oracle's, so it is no requirement: `pip install --no-deps speculators loguru` is enough here, and what only its data
    pipeline imports is stood in for."""
    if importlib.util.find_spec("speculators") is None:
        pytest.skip("speculators is not installed: pip install --no-deps speculators loguru")
    for name in ("datasets", "hs_connectors", "aiohttp", "pydantic_settings"):
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = MagicMock(__spec__=None)
    return importlib.import_module("speculators.models.eagle3")


OPINIONS: list[Config] = [
    {},
    {"norm_before_residual": True, "norm_output": True, "fc_norm": True},
    {"norm_before_fc": True, "qk_norm": True},
    {"num_hidden_layers": 3, "norm_output": True},
    {"yarn": YARN, "boundaries": [1, 2]},
]


def their_model(eagle3: ModuleType, config: Config, tensors: Tensors) -> torch.nn.Module:
    from transformers import LlamaConfig, Qwen3Config  # the oracle's, which takes seconds to import

    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    same += ("rms_norm_eps", "num_hidden_layers", "max_position_embeddings")
    rope = {"rope_theta": config["rope_theta"], "rope_type": "default"}
    if config["yarn"]:
        rope |= config["yarn"] | {"rope_type": "yarn"}
    kind = Qwen3Config if config["qk_norm"] else LlamaConfig
    sizes: dict[str, Any] = {name: config[name] for name in same} | {"attn_implementation": "eager"}
    layer = kind(**sizes, rope_parameters=rope)
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size")
    wiring = {name: config[name] for name in flags} | {"eagle_aux_hidden_state_layer_ids": config["boundaries"]}
    model = eagle3.Eagle3DraftModel(eagle3.Eagle3SpeculatorConfig(transformer_layer_config=layer, **wiring))
    found = model.load_state_dict(speculators(tensors), strict=False)
    assert not found.unexpected_keys and all(name.startswith("verifier_") for name in found.missing_keys)
    return model.eval()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("changes", OPINIONS)
def test_speculators_own_model_computes_the_same(eagle3: ModuleType, changes: Config) -> None:
    config = BASE | {"own_embeddings": True} | changes
    tensors = random_tensors(config)
    model, logits = their_model(eagle3, config, tensors), list[Tensor]()
    model.get_submodule("lm_head").register_forward_hook(lambda module, inputs, output: logits.append(output[0]))
    text, states = tokens(NUM_SLOTS + 1, 3, 96), captured(config, NUM_SLOTS, 3)
    documents = torch.zeros(1, NUM_SLOTS, dtype=torch.int64)
    with torch.no_grad(), torch._dynamo.config.patch(disable=True):
        model(states.flatten(1)[None], text[None, 1:], documents, ttt_steps=NUM_STEPS)
    drafter = load(config, speculators(tensors))
    fused = drafter.fuse(torch.cat((states, states[:1])))
    for step, mine in enumerate(rollout(drafter, text[None], fused, NUM_STEPS)):
        known = NUM_SLOTS - step
        torch.testing.assert_close(mine[0, :known], logits[step][:known], atol=CLOSE, rtol=0)
