"""The doctor: a healthy drafter is left alone, injected faults are named, and its reports can be read by machines."""

from __future__ import annotations

import argparse
import json
import shutil
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from io import StringIO
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file, save_file

from bench.faults import FAULTS, Fault, outcome, write_faulty
from minieagle import diagnosis
from minieagle.diagnosis import NEW_TOKENS, Report, judge, ranked_causes
from minieagle.heatmap import page
from minieagle.llm import embedded
from minieagle.models.drafter_weights import load_drafter
from minieagle.models.eagle3 import Drafter
from minieagle.passages import written
from minieagle.report import lines, table
from minieagle.spec.checks import check_fusion, check_vocabulary, check_weights, looks_random, looks_untrained
from minieagle.spec.doctor import (
    MIN_ROOTS,
    NUM_STEPS,
    Cause,
    Diagnosis,
    Recording,
    RecordingError,
    Result,
    Score,
    _causes,
    _hints,
    _mends,
    captured_states,
    diagnose,
    score,
)
from minieagle.spec.hypotheses import (
    D2T,
    SWAPS,
    Reading,
    Setting,
    Unreadable,
    _exchange,
    boundaries_needed,
    grid,
    reread,
)
from minieagle.spec.observe import Observed, observe_texts
from minieagle.spec.walk import walk
from minieagle.spec.wiring import FILE, Wiring, open_drafter, read_wiring, write_wiring
from tests.drafter_oracle import BASE, WIRINGS, drafter_tensors, save_drafter_files
from tests.embedded import target, tokenizer
from tests.strategies import tiny_target


@cache
def loaded() -> tuple[Drafter, Wiring]:
    return open_drafter(embedded("drafter"), target(), dtype=torch.float32, max_positions=512)


@cache
def whole_recording() -> Recording:
    """What the command measures on: the target's greedy texts, all boundaries kept."""
    passages = written(target(), tokenizer(), NEW_TOKENS, ignore_eos=True)
    drafter, _ = loaded()
    boundaries = boundaries_needed(drafter.config, target().config.num_hidden_layers)
    texts = observe_texts(target(), [passage.tokens for passage in passages], boundaries)
    return Recording(boundaries, texts, tuple(passage.prompt_len for passage in passages))


@cache
def recording() -> Recording:
    """The first texts of it, just enough."""
    whole = whole_recording()
    return replace(whole, texts=whole.texts[:2], first=whole.first[:2])


def wired() -> Reading:
    return Reading(config=loaded()[0].config)


def setting() -> Setting:
    return Setting(target().config, recording().boundaries)


def scored(reading: Reading) -> Score:
    return score(reread(loaded()[0], target(), wired(), reading), reading, recording())


@cache
def healthy() -> tuple[Diagnosis, Report]:
    drafter, wiring = loaded()
    found, findings = judge(target(), drafter, wiring, recording(), embedded("drafter"), max_changes=1)
    causes = ranked_causes(found, findings)
    report = Report(model="t", drafter="d", diagnosis=found, findings=tuple(findings), causes=causes)
    return found, replace(report, num_positions=recording().num_roots)


# Scores


def test_chains_are_those_that_the_engine_drafts():
    # Independent: the offline walk drafts by the serving functions from committed caches, each fed its own last draft.
    text, first = recording().texts[0], recording().first[0]
    lengths = scored(wired()).lengths.int().tolist()[: recording().roots(0).stop - first]
    position, num_steps = first + 1, 0
    while position - 1 - first < len(lengths):
        position, num_steps = position + 1 + lengths[position - 1 - first], num_steps + 1
    online = walk(target(), loaded()[0], text.tokens.tolist()[: position + 1], first + 1, NUM_STEPS)
    assert (online.num_steps, online.num_tokens) == (num_steps, position - first - 1)


@given(st.integers(0, 2**31))
@settings(max_examples=20)
def test_a_gain_is_its_mean_and_vanishes_against_itself(seed: int):
    generator = torch.Generator().manual_seed(seed)
    hits = torch.rand(60, NUM_STEPS, generator=generator) < 0.7
    one = Score(hits, torch.randn(60, NUM_STEPS, generator=generator), torch.arange(60) // 16)
    other = replace(one, hits=torch.rand(60, NUM_STEPS, generator=generator) < 0.7)
    assert one.gain_over(one).mean == one.gain_over(one).error == 0
    assert one.gain_over(other).mean == pytest.approx(one.tokens_per_step - other.tokens_per_step, abs=1e-5)


@given(st.integers(0, 2**31))
@settings(max_examples=30)
def test_noise_is_no_sure_gain(seed: int):
    generator = torch.Generator().manual_seed(seed)
    hits = torch.rand(2, 320, NUM_STEPS, generator=generator) < 0.7
    flat, blocks = torch.zeros(320, NUM_STEPS), torch.arange(320) // 16
    assert not Score(hits[0], flat, blocks).gain_over(Score(hits[1], flat, blocks)).is_sure


def test_a_real_gain_is_sure():
    hits, flat, blocks = torch.ones(320, NUM_STEPS).bool(), torch.zeros(320, NUM_STEPS), torch.arange(320) // 16
    worse = hits.clone()
    worse[::4, 1] = False
    assert Score(hits, flat, blocks).gain_over(Score(worse, flat, blocks)).is_sure


def test_a_short_text_is_refused():
    with pytest.raises(RecordingError, match=f"{MIN_ROOTS} are needed"):
        recording().screen().check()


def test_text_that_the_target_would_not_write_is_refused():
    texts = [replace(text, tokens=text.tokens.roll(7)) for text in recording().texts]
    with pytest.raises(RecordingError, match="of the text's tokens are the target's choice"):
        replace(recording(), texts=texts).check()


@pytest.mark.parametrize(("rate", "counts"), [(0.4, False), (0.9, True)])
def test_a_reading_that_sees_ahead_must_know_the_answer(rate: float, counts: bool):
    wanted = torch.rand(320, NUM_STEPS, generator=torch.Generator().manual_seed(0)) < rate
    flat, blocks = torch.zeros(320, NUM_STEPS), torch.arange(320) // 16
    base = Result((), wired(), Score(torch.zeros(320, NUM_STEPS).bool(), flat, blocks))
    ahead = replace(base, reading=replace(wired(), state_shift=1), score=Score(wanted, flat, blocks))
    assert _mends(ahead, base) is counts
    assert _mends(replace(ahead, reading=wired()), base)


def results(base_rate: float, rate: float, nats: float = 0.0) -> tuple[Result, Result]:
    """The drafter as wired and another reading, of which each hits at a share of the roots, all depths alike."""
    roots, blocks = torch.arange(640), torch.arange(640) // 16
    hits = [
        ((roots * r).floor() != ((roots - 1) * r).floor())[:, None].expand(-1, NUM_STEPS) for r in (base_rate, rate)
    ]
    base = Result((), wired(), Score(hits[0], torch.zeros(640, NUM_STEPS), blocks))
    new = Score(hits[1], torch.full((640, NUM_STEPS), nats), blocks)
    gains = new.gain_over(base.score), new.log_prob_over(base.score)
    return base, Result((), wired(), new, *gains)


@pytest.mark.parametrize(
    ("base_rate", "rate", "nats", "is_cause"),
    [(0.4, 0.6, 0.0, True), (0.4, 0.6, -1.0, True), (0.4, 0.41, 1.0, False), (0.4, 0.4, 1.0, False)],
)
def test_only_a_good_part_of_the_lost_tokens_is_a_cause(base_rate: float, rate: float, nats: float, is_cause: bool):
    base, new = results(base_rate, rate, nats)
    assert _mends(new, base) is is_cause
    assert _hints(new, base)


def test_a_sure_but_small_gain_is_no_cause():
    base, new = results(0.4, 0.4)
    hits = new.score.hits.clone()
    hits[::16] = True
    small = replace(new, score=replace(new.score, hits=hits))
    assert small.score.gain_over(base.score).is_sure and not _mends(small, base)


@pytest.mark.parametrize(("rate", "own_share", "words"), [(0.2, 1.0, "no reading explains"), (0.2, 0.5, "can't tell")])
def test_low_agreement_is_a_fault_only_on_the_targets_own_text(rate: float, own_share: float, words: str):
    base, _ = results(rate, rate)
    (cause,) = _causes(base, base, [base], own_share)
    assert words in cause.sentence and cause.result is None
    assert Diagnosis(base, base, (base,), (cause,), (), own_share).is_judged is (own_share == 1.0)


def test_agreement_that_falls_by_depth_is_low():
    base, _ = results(0.7, 0.7)
    falling = base.score.hits.clone()
    falling[::2, -1] = False
    assert not _causes(base, base, [base], 1.0)
    low = replace(base, score=replace(base.score, hits=falling))
    assert "at depth 5, and no reading" in _causes(low, low, [low], 1.0)[0].sentence


# Readings


def test_the_same_reading_is_the_same_drafter():
    again = reread(loaded()[0], target(), wired(), wired())
    rows = torch.randn(5, 3, 256, generator=torch.Generator().manual_seed(0))
    assert torch.equal(again.fuse(rows), loaded()[0].fuse(rows))
    assert torch.equal(again.target_ids, loaded()[0].target_ids)


def test_every_change_of_the_grid_is_another_reading_with_words():
    changes = list(grid(wired(), setting()))
    assert len({change.reading for change in changes} | {wired()}) == len(changes) + 1
    assert all(change.cause and change.remedy and change.name for change in changes)


def test_the_grid_has_every_aspect():
    aspects = {change.aspect for change in grid(wired(), setting())}
    assert aspects >= {
        *("boundaries", "last state", "norm_output", "norm_before_residual", "rope_style", "rope_theta", "yarn"),
        *("tokens", "states", "d2t", "lm_head", "capture", "scale", *SWAPS),
    }


@pytest.mark.parametrize("kind", D2T)
def test_d2t_is_read_by_its_definition(kind: str):
    ids = torch.arange(2048)
    raw = loaded()[0].target_ids - ids
    wanted = {"offset": ids + raw, "absolute": raw, "identity": ids}
    wanted |= {"offset, one too low": ids + raw + 1, "offset, one too high": ids + raw - 1}
    reading = replace(wired(), d2t=kind)
    if int(wanted[kind].min()) < 0 or int(wanted[kind].max()) >= 4096:
        with pytest.raises(Unreadable):
            reread(loaded()[0], target(), wired(), reading)
    else:
        assert torch.equal(reread(loaded()[0], target(), wired(), reading).target_ids, wanted[kind])


def test_a_reading_needs_its_weights():
    config = replace(wired().config, fc_norm=True)
    with pytest.raises(Unreadable, match="fc_norms"):
        reread(loaded()[0], target(), wired(), replace(wired(), config=config))


@pytest.mark.parametrize("what", SWAPS)
def test_a_swap_twice_is_none(what: str):
    weights = {name: tensor.clone() for name, tensor in loaded()[0].state_dict().items()}
    once = dict(weights)
    _exchange(once, what, wired().config)
    assert any(not torch.equal(once[name], weights[name]) for name in weights)
    _exchange(once, what, wired().config)
    assert all(torch.equal(once[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("own", "stated", "field", "words"),
    [
        (True, False, "norm_output", "in its config.json, or pass --fix"),
        (False, False, "rope_theta", "in its config.json, or pass --fix"),
        (False, False, "norm_before_head", "only a wiring.json can state"),
        (True, True, "norm_output", "config.json is not read"),
        (False, True, "rope_theta", "config.json is not read"),
    ],
)
def test_a_remedy_names_the_file_that_is_read(own: bool, stated: bool, field: str, words: str):
    assert words in Setting(target().config, (), own_format=own, stated=stated).remedy(field, "true")


def test_beside_a_wiring_no_remedy_is_to_edit_the_config():
    where = replace(setting(), stated=True)
    remedies = [change.remedy for change in grid(wired(), where) if change.expressible and change.aspect != "d2t"]
    assert len(remedies) > 15 and all("--fix" in remedy and "in its config.json" not in remedy for remedy in remedies)


@pytest.mark.parametrize("wiring", WIRINGS)
def test_every_reading_of_every_wiring_runs_or_is_ruled_out(wiring: str, tmp_path: Path):
    config = BASE | WIRINGS[wiring]
    drafter = load_drafter(save_drafter_files(tmp_path, config, drafter_tensors(config)), tiny_target())
    boundaries = boundaries_needed(drafter.config, tiny_target().config.num_hidden_layers)
    texts = observe_texts(tiny_target(), [list(range(2 * NUM_STEPS + 2))], boundaries)
    text, original = Recording(boundaries, texts, (1,)), Reading(config=drafter.config)
    changes = list(grid(original, Setting(tiny_target().config, boundaries)))
    scored = 0
    for change in changes:
        with suppress(Unreadable):
            variant = reread(drafter, tiny_target(), original, change.reading)
            scored += score(variant, change.reading, text).log_probs.isfinite().any().item()
    assert scored > len(changes) // 2


def test_what_a_rank_holds_lies_between_two_boundaries():
    text, boundaries = recording().texts[0], recording().boundaries
    full = captured_states(text, boundaries, wired())
    half = captured_states(text, boundaries, replace(wired(), num_ranks=2))
    before = replace(wired(), config=replace(wired().config, boundaries=(1, 4, 7)))
    torch.testing.assert_close(half, (full + captured_states(text, boundaries, before)) / 2)


def test_boundaries_to_record_stay_few_for_a_deep_target():
    config = replace(loaded()[0].config, boundaries=(2, 30, 58))
    needed = boundaries_needed(config, 61)
    assert {0, 1, 2, 3, 29, 30, 31, 57, 58, 59, 60, 61} <= set(needed)
    assert len(needed) < 20


# Verdicts


def test_a_healthy_drafter_is_reported_healthy():
    found, report = healthy()
    assert found.is_healthy
    assert report.verdict == "healthy"
    assert found.results[0] is found.base


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_refused_by_name_or_among_the_first_two_causes(fault: Fault, folder: Path):
    text = whole_recording() if fault.is_weak else recording()
    found = outcome(fault, target(), text, folder, max_changes=fault.num_changes)
    print(f"{fault.name:45s} {found.how:16s} {found.words[:110]}")
    assert found.is_found, found.words


def test_the_matrix_has_twenty_faults_and_no_fault_twice():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20
    assert sum(not fault.refused for fault in FAULTS) >= 12


# Checks without a model run


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_random_matrices_look_random_and_trained_ones_do_not():
    assert looks_random(drawn(256, 768)) and looks_random(drawn(200, 100) * 0.02)
    assert looks_random(torch.rand(300, 300, generator=torch.Generator().manual_seed(1)) - 0.5)
    trained = [p for p in loaded()[0].parameters() if p.dim() == 2]
    assert len(trained) == 6 and not any(map(looks_random, trained))


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"fc": torch.tensor([[1.0, torch.nan]])}, "fc holds NaN"),
        ({"fc": torch.tensor([[1.0, torch.inf]])}, "fc holds NaN or infinity"),
        ({"o": torch.zeros(3, 3)}, "o is all zeros"),
        ({"norm": torch.ones(8)}, "norm: all ones"),
        ({"up": drawn(128, 128)}, "up looks untrained"),
    ],
)
def test_a_weight_that_cannot_be_right_is_a_fault(weights: dict[str, torch.Tensor], words: str):
    (finding,) = check_weights(weights)
    assert finding.is_fault and words in finding.sentence


def test_one_norm_of_ones_among_others_is_a_note():
    (finding,) = check_weights({"norm": torch.ones(8), "hidden_norm": torch.full((8,), 1.5)})
    assert not finding.is_fault


def test_the_embedded_weights_pass():
    assert not [finding for finding in check_weights(dict(loaded()[0].named_parameters())) if finding.is_fault]


def test_a_few_updates_leave_the_norms_near_one():
    trained = dict(loaded()[0].named_parameters())
    assert not looks_untrained(trained)
    early = {name: tensor * 0 + 1.01 if tensor.dim() == 1 else tensor for name, tensor in trained.items()}
    assert looks_untrained(early) and any("hardly been trained" in f.sentence for f in check_weights(early))


def test_an_untrained_drafter_is_not_called_rotated(tmp_path: Path):
    words = {name: " ".join(cause.sentence for cause in seen(name, tmp_path)) for name in (ROTATED, UNTRAINED)}
    assert "QuaRot" in words[ROTATED]
    assert "QuaRot" not in words[UNTRAINED] and "untrained" in words[UNTRAINED]


ROTATED, UNTRAINED = "states rotated in training", "nothing trained"


def _redraw(tensors: dict[str, torch.Tensor], _: object) -> None:
    generator = torch.Generator().manual_seed(0)
    for name in [name for name, tensor in tensors.items() if tensor.is_floating_point() and name != "lm_head.weight"]:
        start = torch.randn(tensors[name].shape, generator=generator) * 0.02
        tensors[name] = (start if tensors[name].dim() == 2 else 1 + start.clamp(-0.01, 0.01)).to(torch.bfloat16)


def seen(name: str, folder: Path) -> tuple[Cause, ...]:
    """The causes of a fault, without the grid."""
    fault = next((f for f in FAULTS if f.name == name), Fault(name=name, expect="", tensors=_redraw))
    directory = write_faulty(fault, target(), folder)
    drafter, wiring, _ = diagnosis.open_undecided(directory, target())
    return ranked_causes(*judge(target(), drafter, wiring, recording(), directory, max_changes=0))


def test_a_vocabulary_of_other_text_is_a_fault():
    variant = reread(loaded()[0], target(), wired(), wired())
    assert [finding.is_fault for finding in check_vocabulary(variant, recording())] == [False]
    variant.target_ids = torch.arange(2000, 4048)
    assert any(finding.is_fault for finding in check_vocabulary(variant, recording()))


def test_a_rotated_stream_no_longer_goes_with_fc():
    assert not list(check_fusion(loaded()[0], recording()))
    rotation = torch.linalg.qr(drawn(256, 256)).Q
    rotated = [replace(text, captured=text.captured.float() @ rotation) for text in recording().texts]
    (finding,) = check_fusion(loaded()[0], replace(recording(), texts=rotated))
    assert "rotated" in finding.sentence


# The command


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    diagnosis.add_options(parser)
    return parser.parse_args(words)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command without its grid: the drafter as wired only."""
    monkeypatch.setattr(diagnosis, "diagnose", partial(diagnose, max_changes=0))
    monkeypatch.setattr(diagnosis, "record", lambda *_: recording())
    monkeypatch.setattr(diagnosis, "written", lambda *_, **__: [1])


@pytest.mark.usefixtures("quick")
def test_a_healthy_drafter_exits_with_0_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert diagnosis.run(options("--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html"))) == 0
    assert "healthy" in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_text())["verdict"] == "healthy"
    assert "healthy" in (tmp_path / "r.html").read_text()


@pytest.mark.usefixtures("quick")
def test_json_on_standard_output_stands_alone(capsys: pytest.CaptureFixture[str]):
    assert diagnosis.run(options("--json", "-")) == 0
    assert json.loads(capsys.readouterr().out)["readings"][0]["reading"] == "as wired"


def faulty(name: str, folder: Path) -> Path:
    return write_faulty(next(fault for fault in FAULTS if fault.name == name), target(), folder)


@pytest.mark.usefixtures("quick")
def test_a_refused_drafter_exits_with_1_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    directory = faulty("a number that is none", tmp_path)
    assert diagnosis.run(options("--drafter", str(directory), "--json", str(tmp_path / "r.json"))) == 1
    assert "refused: " in capsys.readouterr().out
    assert "NaN" in json.loads((tmp_path / "r.json").read_text())["refusal"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["layer ids without convention", "no ids at all"])
def test_undecided_boundaries_are_measured_and_a_fault(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert diagnosis.run(options("--drafter", str(faulty(name, tmp_path)))) == 1
    said = capsys.readouterr().out
    assert "undecided: " in said and "minieagle doctor" not in said


def test_outputs_taken_for_inputs_are_told_in_the_users_words(tmp_path: Path):
    drafter, wiring, undecided = diagnosis.open_undecided(faulty("layer ids without convention", tmp_path), target())
    found, findings = judge(target(), drafter, wiring, recording(), tmp_path / "layer-ids-without-convention")
    first, *others = ranked_causes(found, findings, undecided)
    assert "measured: boundaries 2 5 8" in first.sentence and "--capture-convention out" in first.remedy
    assert all(cause.result is not first.result for cause in others)


def test_a_flag_of_two_meanings_is_read_one_way_and_left_to_the_grid(tmp_path: Path):
    directory = faulty("layer ids without convention", tmp_path)
    config = json.loads((directory / "config.json").read_text()) | {"norm_output": True}
    (directory / "config.json").write_text(json.dumps(config))
    for said in ((None, None), ("out", None), (None, [2, 5, 8])):
        _, wiring, undecided = diagnosis.open_undecided(directory, target(), *said)
        assert undecided is not None and "norm_output=True" in undecided.why and "doctor" not in undecided.why
        assert wiring.config.norm_before_head and not wiring.config.norm_output


def test_the_answer_is_the_whole_combination_and_only_that_is_stamped(tmp_path: Path):
    directory = faulty("layer ids without convention", tmp_path)
    config = json.loads((directory / "config.json").read_text()) | {"norm_output": False}
    (directory / "config.json").write_text(json.dumps(config))
    drafter, wiring, question = diagnosis.open_undecided(directory, target())
    assert question is not None and set(question.fields) == {"boundaries", "norm_output", "norm_before_head"}
    found, findings = judge(target(), drafter, wiring, recording(), directory, max_changes=1)
    causes = ranked_causes(found, findings, question)
    assert "measured: boundaries 2 5 8, norm_output false, norm_before_head true" in causes[0].sentence
    report = Report(model="t", drafter="d", diagnosis=found, causes=causes)
    diagnosis.fix(report, directory, target(), wiring, question, options())
    stated = read_wiring(directory, target().config)
    assert stated.config.boundaries == (2, 5, 8) and stated.config.norm_before_head
    assert {name for name, source in stated.sources.items() if "measured" in source} == set(question.fields)


def half_foreign() -> Recording:
    """Every other token is one that the target would not write, and states to go with such a text."""
    whole, draw = recording(), torch.Generator().manual_seed(0)
    texts: list[Observed] = []
    for text in whole.texts:
        tokens = text.tokens.clone()
        tokens[1::2] = torch.randint(4096, tokens[1::2].shape, generator=draw)
        texts.append(replace(text, tokens=tokens, captured=text.captured.roll(7, dims=0)))
    return replace(whole, texts=texts)


@pytest.mark.usefixtures("quick")
def test_a_fault_on_foreign_text_is_confirmed_on_the_targets_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recordings = iter([half_foreign(), recording()])
    monkeypatch.setattr(diagnosis, "_read", lambda *_: [1])
    monkeypatch.setattr(diagnosis, "record", lambda *_: next(recordings))
    report = diagnosis.examine(options("--text", "some.txt"), Console(quiet=True))
    assert report.verdict == "healthy" and "measured again" in report.notes[0]
    assert next(recordings, None) is None


@pytest.mark.usefixtures("quick")
def test_foreign_text_alone_condemns_nobody(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(diagnosis, "_read", lambda *_: [1])
    monkeypatch.setattr(diagnosis, "record", lambda *_: half_foreign())
    report = diagnosis.examine(options("--text", "some.txt", "--stream-layers"), Console(quiet=True))
    assert report.verdict == "unjudged" and len(report.causes) == 1
    assert "can't tell" in report.causes[0].sentence and "--text out" in report.causes[0].remedy
    assert any(line.startswith("unjudged: ") for line in lines(report))


def test_a_missing_tensor_is_named_before_a_stale_contract(tmp_path: Path):
    shutil.copytree(embedded("drafter"), tmp_path / "d")
    write_wiring(tmp_path / "d", replace(loaded()[1], weights="changed since"))
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if "q_proj" not in name}, tmp_path / "d" / "model.safetensors")
    for more in ((), ("--fix",)):
        report = diagnosis.examine(options("--drafter", str(tmp_path / "d"), *more), Console(quiet=True))
        assert report.refusal is not None and "q_proj" in report.refusal and "doctor" not in report.refusal
    assert (tmp_path / "d" / FILE).exists()


@pytest.mark.usefixtures("quick")
def test_a_stale_contract_is_a_fault_that_does_not_point_to_itself(tmp_path: Path):
    shutil.copytree(embedded("drafter"), tmp_path / "d")
    write_wiring(tmp_path / "d", replace(loaded()[1], weights="changed since"))
    report = diagnosis.examine(options("--drafter", str(tmp_path / "d")), Console(quiet=True))
    assert report.verdict == "fault" and "stale" in str(report.undecided)
    assert "minieagle doctor" not in json.dumps(report.to_json() | {"wiring": None})
    assert "--fix" in report.causes[0].remedy


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"version": 1, "config": 3}'])
def test_fix_replaces_a_damaged_contract(content: str, tmp_path: Path):
    shutil.copytree(embedded("drafter"), tmp_path / "d")
    (tmp_path / "d" / FILE).write_text(content)
    assert diagnosis.run(options("--drafter", str(tmp_path / "d"), "--fix")) == 0
    assert read_wiring(tmp_path / "d", target().config).config == wired().config


def shown(found: Diagnosis, width: int = 80) -> str:
    console = Console(width=width, record=True, quiet=False, file=StringIO())
    console.print(table(found))
    return console.export_text()


def test_a_table_of_80_columns_cuts_no_name():
    found, _ = healthy()
    text = shown(found)
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
    words = {word for result in found.results[:12] for word in result.name.split()}
    assert words <= set(text.split()) and "agreement by" in text


def test_what_is_ruled_out_is_marked():
    found, _ = healthy()
    ahead = replace(found.base, reading=replace(wired(), state_shift=1), score=results(0.2, 0.2)[0].score)
    ahead = replace(ahead, gain=results(0.2, 0.6)[1].gain)
    marked = replace(found, results=(ahead, *found.results))
    assert "(ruled out)" in shown(marked) and "(ruled out)" not in shown(found)
    report = Report(model="t", drafter="d", diagnosis=marked)
    assert "sees ahead" in str(report.to_json()["readings"][0]["ruled_out"])
    assert any("is ruled out as a cause" in line for line in lines(report))
    assert "ruled out: sees ahead" in page(report.to_json())


def test_a_hint_by_log_probability_is_a_note():
    found, _ = healthy()
    report = Report(model="t", drafter="d", diagnosis=replace(found, suspect=results(0.4, 0.4, 1.0)[1]))
    assert report.verdict == "healthy" and any("too few tokens per step" in line for line in lines(report))


def test_a_streamed_target_gives_the_same_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(diagnosis, "diagnose", partial(diagnose, max_changes=0))
    lines = [json.dumps({"tokens": text.tokens.tolist(), "prompt_len": 20}) for text in recording().texts]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    words = "--text", str(tmp_path / "texts.jsonl")
    console = Console(quiet=True)
    resident, streamed = (diagnosis.examine(options(*words, *more), console) for more in ((), ("--stream-layers",)))
    assert resident.to_json() == streamed.to_json()


def test_a_short_text_is_refused_before_the_target_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(diagnosis, "open_source", None)
    (tmp_path / "short.txt").write_text("I would like to find a restaurant.")
    with pytest.raises(RecordingError, match="pass a longer one"):
        diagnosis.run(options("--text", str(tmp_path / "short.txt")))


def test_a_streamed_target_needs_a_text():
    with pytest.raises(ValueError, match="--text FILE"):
        diagnosis.run(options("--stream-layers"))


def test_a_page_fetches_nothing_and_shows_every_reading():
    _, report = healthy()
    text = page(report.to_json())
    assert not any(word in text for word in ("http:", "https:", "<script", "src=", "url(", "@import"))
    assert text.count("<rect") == NUM_STEPS * len(report.to_json()["readings"])


def test_a_page_escapes_what_it_is_given():
    assert "<b>" not in page(Report(model="<b>", drafter="d", refusal="<b>").to_json())


def test_json_is_plain_and_ranked():
    report = json.loads(json.dumps(healthy()[1].to_json()))
    gains = [reading["gain"] for reading in report["readings"]]
    assert gains == sorted(gains, reverse=True) and len(gains) > 30


def test_fix_writes_a_contract_that_loads(tmp_path: Path):
    directory = faulty("post-norm state fed back", tmp_path)
    drafter, wiring = open_drafter(directory, target(), dtype=torch.float32, max_positions=512)
    found, findings = judge(target(), drafter, wiring, recording(), directory, max_changes=1)
    report = Report(model="t", drafter="d", diagnosis=found, causes=ranked_causes(found, findings))
    assert diagnosis.fix(report, directory, target(), wiring, None, options()) is not None
    stated = read_wiring(directory, target().config)
    assert stated.config.norm_output is False and stated.golden is not None


@pytest.mark.usefixtures("quick")
def test_fix_replaces_a_stale_contract(tmp_path: Path):
    shutil.copytree(embedded("drafter"), tmp_path / "d")
    stale = replace(loaded()[1], weights="changed since")
    write_wiring(tmp_path / "d", stale)
    assert diagnosis.run(options("--drafter", str(tmp_path / "d"))) == 1
    assert diagnosis.run(options("--drafter", str(tmp_path / "d"), "--fix")) == 0
    assert read_wiring(tmp_path / "d", target().config).weights != "changed since"


def test_fix_leaves_alone_what_no_wiring_mends(tmp_path: Path):
    found, report = healthy()
    report = replace(report, causes=ranked_causes(found, list(check_weights({"o": torch.zeros(2, 2)}))))
    assert diagnosis.fix(report, tmp_path, target(), loaded()[1], None, options()) is None
    assert not (tmp_path / FILE).exists()
