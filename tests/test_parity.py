"""The parity package: logs are read strictly, a replay finds what diverges and tells noise from a fault."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from clover.parity.__main__ import main
from clover.parity.fingerprint import fingerprint
from clover.parity.log import read_log, write_log
from clover.parity.models import open_model
from clover.parity.replay import Divergence, replay
from clover.parity.report import summary, versions, write_report
from clover.parity.sglang_raw import convert
from clover.parity.tiny_sdar import write_tiny_sdar

ROOT = Path(__file__).parents[1]
LOGS = sorted((ROOT / "parity" / "logs").glob("sglang-*-sdar-*.jsonl"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_sdar(tmp_path_factory.mktemp("sdar"))


@pytest.fixture
def log():
    return read_log(LOGS[0])


def replayed(folder: Path, log):
    return replay(log, open_model(folder, log.header.algorithm["block_size"]))


def up_to(log, last):
    """The log with one step replaced, and of its request the later ones gone: they followed from the other one."""
    place = (last.block, last.step)
    kept = [s for s in log.steps if s.request != last.request or (s.block, s.step) < place]
    return replace(log, steps=[*kept, last])


def command(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "clover.parity", *map(str, arguments)], capture_output=True, text=True, cwd=ROOT
    )


# ---- logs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_a_log_is_the_same_after_writing_and_reading(path, tmp_path):
    log = read_log(path)
    write_log(tmp_path / "log.jsonl", log)
    assert read_log(tmp_path / "log.jsonl") == log
    assert (tmp_path / "log.jsonl").read_text() == path.read_text()


def changed(line: str, **changes) -> str:
    entry = json.loads(line) | changes
    return json.dumps({name: value for name, value in entry.items() if value is not ...}) + "\n"


def as_commit(line: str, tokens: list[int]) -> str:
    """A commit of the block that a step's line is of."""
    step = json.loads(line)
    kept = {name: step[name] for name in ("request", "block", "start")}
    return json.dumps({"type": "commit"} | kept | {"tokens": tokens}) + "\n"


LINES = LOGS[0].read_text().splitlines()
MALFORMED = {
    "no JSON": (3, lambda line: line[:-9] + "\n", "no JSON"),
    "no object": (2, lambda line: "[1]\n", "`type` is \\[1\\]"),
    "an unknown kind": (2, lambda line: changed(line, type="x"), "`type` is 'x'.*header, request, step, commit"),
    "another version": (1, lambda line: changed(line, version=1), "1\\), but must be \\('clover-parity', 2\\)"),
    "another format": (1, lambda line: changed(line, format="x"), "'x'"),
    "no header": (1, lambda line: "", "request before the header"),
    "two headers": (2, lambda line: json.dumps({"type": "header"}) + "\n", "second header"),
    "a field missing": (2, lambda line: changed(line, prompt=...), "'prompt'"),
    "an unknown field": (2, lambda line: changed(line, color=1), "`color`"),
    "a wrong type": (2, lambda line: changed(line, prompt=["x"]), "`prompt`"),
    "a truth for a number": (2, lambda line: changed(line, prompt=[True]), "`prompt`"),
    "no budget": (2, lambda line: changed(line, sampling={}), "max_new_tokens"),
    "a truth for a budget": (
        2,
        lambda line: changed(line, sampling={"max_new_tokens": True}),
        "max_new_tokens` is True",
    ),
    "a budget smaller than its answer": (2, lambda line: changed(line, sampling={"max_new_tokens": 1}), "is 1, but"),
    "an empty prompt": (2, lambda line: changed(line, prompt=[]), "`prompt` is \\[\\]"),
    "an empty answer": (2, lambda line: changed(line, output=[]), "`output` is \\[\\]"),
    "a token below zero": (2, lambda line: changed(line, prompt=[-1]), "`prompt` is \\[-1\\]"),
    "a token beyond any vocabulary": (2, lambda line: changed(line, output=[10**30]), "`output` is \\[1000"),
    "an end that is none": (2, lambda line: changed(line, finish_reason="abort"), "`finish_reason` is 'abort'"),
    "a text for a stop token": (
        2,
        lambda line: changed(line, sampling={"max_new_tokens": 99, "stop_token_ids": ["a"]}),
        "`stop_token_ids`",
    ),
    "a text for an end token": (
        1,
        lambda line: line.replace('"eos_token_ids": [', '"eos_token_ids": ["x", '),
        "eos_token",
    ),
    "a truth for a block": (
        1,
        lambda line: line.replace('"block_size": 4', '"block_size": true'),
        "`block_size` is True",
    ),
    "no counts": (1, lambda line: changed(line, counts=...), "`counts` is None"),
    "no UTF-8": (2, lambda line: line[:30] + "\udcff" + line[30:], "utf-8"),
    "nested too deeply": (2, lambda line: "[" * 100_000 + "\n", "nested too deeply"),
    "requests out of order": (2, lambda line: changed(line, request=4), "`request` is 4, but must be 0"),
    "a step of no request": (3, lambda line: changed(line, request=7), "`request` is 7"),
    "a commit of something else": (4, lambda line: as_commit(LINES[2], [1] * 4), "the commit is \\[1, 1, 1, 1\\]"),
    "a commit before any step": (3, lambda line: as_commit(line, [100, 107, 114, 3]), "block 0, which has no steps"),
    "a short block": (3, lambda line: changed(line, after=[1]), "`after` has 1 entries"),
    "a block elsewhere": (3, lambda line: changed(line, start=2), "`start` is 2"),
    "a step that does not follow": (5, lambda line: changed(line, before=[1] * 4), "`before` is .*the step before it"),
    "a confidence that is no number": (3, lambda line: line.replace("0.8745125532150269", "NaN"), "NaN is no number"),
    "a block of nothing": (1, lambda line: line.replace('"block_size": 4', '"block_size": 0'), "`block_size` is 0"),
    "a token that was not chosen": (3, lambda line: changed(line, after=[100, 107, 114, 109]), "`after` has 109 at 3"),
    "a block's end left out": (5, lambda line: "", "block 1 is left with masked positions"),
    "a step left out": (4, lambda line: changed(line, step=5), "`step` is 5, but must be"),
    "a confidence where nothing is masked": (3, lambda line: changed(line, confidences=[0.5] * 4), "`confidences`"),
    "a clean token changed": (3, lambda line: changed(line, after=[1] * 4), "`after` has another token"),
    "a header without a model": (1, lambda line: changed(line, model={}), "`architectures` is None in `model`"),
    "an algorithm without a threshold": (
        1,
        lambda line: changed(line, algorithm={"name": "LowConfidence", "block_size": 4}),
        "`threshold`",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_line_is_refused_with_its_number(name, tmp_path):
    number, change, message = MALFORMED[name]
    lines = LOGS[0].read_text().splitlines(keepends=True)
    lines[number - 1] = change(lines[number - 1])
    path = tmp_path / "log.jsonl"
    path.write_text("".join(lines), errors="surrogateescape")
    with pytest.raises(ValueError, match=f"log.jsonl, line {number}: .*{message}"):
        read_log(path)


@pytest.mark.parametrize("kind", ["request", "step", "commit"])
def test_a_log_that_lost_its_end_or_all_of_a_kind_is_not_whole(kind, tmp_path):
    lines = LOGS[0].read_text().splitlines(keepends=True)
    kinds = [json.loads(line)["type"] for line in lines]
    cut = len(kinds) - 1 - kinds[::-1].index("request")
    for kept in (lines[:cut], [line for line, of in zip(lines, kinds, strict=True) if of != kind or kind == "request"]):
        (tmp_path / "log.jsonl").write_text("".join(kept))
        if kept != lines:
            with pytest.raises(ValueError, match="log.jsonl: the header counts .* the log is not whole|has no steps"):
                read_log(tmp_path / "log.jsonl")


def test_a_log_that_could_not_be_read_is_not_written(tmp_path):
    log = read_log(LOGS[0])
    (tmp_path / "log.jsonl").write_text("before")
    with pytest.raises(ValueError, match="`prompt` is"):
        write_log(tmp_path / "log.jsonl", replace(log, requests=[replace(log.requests[0], prompt=[])], steps=[]))
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]
    assert (tmp_path / "log.jsonl").read_text() == "before"


def test_an_empty_file_is_no_log(tmp_path):
    (tmp_path / "log.jsonl").write_text("")
    with pytest.raises(ValueError, match="line 1: the file is empty"):
        read_log(tmp_path / "log.jsonl")


def test_a_fingerprint_changes_with_a_weight_and_a_config_and_not_with_how_it_is_loaded(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    for name, fields in {"same": {"dtype": "bfloat16"}, "other": {"rms_norm_eps": 1e-5}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").symlink_to(folder / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps(config | fields))
    assert fingerprint(tmp_path / "same") == fingerprint(folder) != fingerprint(tmp_path / "other")
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "same" / "model.safetensors").unlink()
    (tmp_path / "same" / "model.safetensors").write_bytes(weights)
    assert fingerprint(tmp_path / "same") != fingerprint(folder)


# ---- replays ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_a_genuine_sglang_log_replays_equal_in_every_request_and_step(path, folder):
    log = read_log(path)
    report = replayed(folder, log)
    assert report.requests_equal == report.requests == len(log.requests) == 9
    assert report.steps_equal == len(report.comparisons) == len(log.steps) - report.not_replayed > 50
    assert not report.divergences
    assert max(report.differences) < 1e-3


def test_another_threshold_is_found_to_be_another_algorithm_and_later_blocks_still_count(folder, log):
    """As if our loop accepted from 0.5 on."""
    report = replayed(
        folder, replace(log, header=replace(log.header, algorithm=log.header.algorithm | {"threshold": 0.5}))
    )
    assert {divergence.kind for divergence in report.divergences} == {"acceptance"}
    assert not report.is_explained
    assert len(report.comparisons) == len(log.steps) - report.not_replayed


@pytest.mark.parametrize("kind", ["acceptance", "token"])
def test_a_divergence_is_numerical_if_the_decision_was_closer_than_the_noise_and_the_paths_differ_by_rounding(
    folder, log, kind
):
    report = replayed(folder, log)
    noise, most = report.noise[kind], report.plausible[kind].worst
    assert noise > 0
    for margin, difference, verdict in (
        (noise / 10, noise, "numerical"),
        (noise / 10, 2 * most, "algorithmic"),
        (noise * 10, noise, "algorithmic"),
    ):
        report.divergences = [Divergence(0, 0, 0, 3, kind, 1, 2, margin, difference)]
        report.judge()
        assert report.divergences[0].verdict == verdict
        assert report.is_explained == (verdict == "numerical")


def test_another_token_is_found_where_it_stands(folder, log):
    step = log.steps[4]
    i = next(i for i, (a, b) in enumerate(zip(step.before, step.after, strict=True)) if a != b)
    tokens, after = list(step.tokens), list(step.after)
    tokens[i] = after[i] = 160 if tokens[i] != 160 else 161
    report = replayed(folder, up_to(log, replace(step, tokens=tokens, after=after)))
    first = report.divergences[0]
    assert (first.kind, first.verdict, first.position) == ("token", "algorithmic", step.start + i)
    assert (first.logged, first.ours) == (tokens[i], step.tokens[i])


def test_another_end_is_algorithmic(folder, log):
    requests = [replace(log.requests[0], finish_reason="stop"), *log.requests[1:]]
    report = replayed(folder, replace(log, requests=requests))
    assert [(d.request, d.kind, d.verdict) for d in report.divergences] == [(0, "finish", "algorithmic")]
    assert report.requests_equal == 8


def test_a_fault_that_moves_every_logit_is_no_noise(folder, log):
    """Logits two in a hundred too large: few decisions change, but rounding in fp32 explains nothing of the kind."""
    model = open_model(folder, log.header.algorithm["block_size"])
    model.model.lm_head.weight.data *= 1.02
    report = replay(log, model)
    assert {("token", "mean"), ("token", "worst")} <= {found[:2] for found in report.implausible}
    assert not report.is_explained
    assert report.noise["token"] == 0.1
    assert any(line.startswith("algorithmic: logit margins differ by") for line in summary(report))


def test_bfloat16_on_either_side_allows_for_its_rounding(folder, log):
    model = open_model(folder, log.header.algorithm["block_size"], "bfloat16")
    report = replay(log, model, "bfloat16")
    assert report.plausible["acceptance"].worst > 0.1
    assert max(report.differences) > 1e-3
    assert report.is_explained
    assert len(report.comparisons) == len(log.steps) - report.not_replayed
    coarse = replace(log, header=replace(log.header, dtype="bfloat16"))
    assert replayed(folder, coarse).plausible == report.plausible


def test_a_close_decision_does_not_excuse_a_difference_that_rounding_cannot_make(folder, log):
    """Logged as a hair above the threshold, where ours is far below it."""
    step = next(s for s in log.steps if any(c is not None and c < 0.5 for c in s.confidences))
    i = next(i for i, c in enumerate(step.confidences) if c is not None and c < 0.5)
    confidences, after = list(step.confidences), list(step.after)
    confidences[i], after[i] = 0.6 + 1e-9, step.tokens[i]
    report = replayed(folder, up_to(log, replace(step, confidences=confidences, after=after)))
    first = next(d for d in report.divergences if d.position == step.start + i)
    assert (first.kind, first.verdict) == ("acceptance", "algorithmic")
    assert first.margin < 1e-6 < 0.1 < first.difference


def test_a_step_missing_in_between_and_a_log_of_nothing_are_refused(folder, log):
    step = next(s for s in log.steps if s.step == 1)
    with pytest.raises(ValueError, match=f"request {step.request}, block .*one of them may be missing"):
        replayed(folder, replace(log, steps=[s for s in log.steps if s is not step]))
    with pytest.raises(ValueError, match="no requests"):
        replayed(folder, replace(log, requests=[], steps=[]))


def test_a_recording_of_another_model_is_refused():
    with pytest.raises(ValueError, match="ran another model"):
        convert(RAW | {"steps": [EVENT | {"mask_id": 99_999}]}, ROOT / "checkpoints" / "clover-tiny")


def test_a_log_without_steps_is_compared_by_its_texts(folder, log):
    report = replayed(folder, replace(log, steps=[]))
    assert (report.requests_equal, report.divergences, report.is_explained) == (9, [], True)
    assert "steps: none logged, only the texts are compared" in summary(report)
    output = [*log.requests[0].output[:-1], 160]
    other = replace(log, steps=[], requests=[replace(log.requests[0], output=output), *log.requests[1:]])
    report = replayed(folder, other)
    assert [(d.request, d.kind, d.verdict) for d in report.divergences] == [(0, "text", "unexplained")]
    assert report.divergences[0].position == len(log.requests[0].prompt) + len(output) - 1
    assert (report.requests_equal, report.is_explained) == (8, False)


def test_what_cannot_be_replayed_is_refused_by_name(folder, log):
    header = replace(log.header, algorithm=log.header.algorithm | {"name": "JointThreshold"})
    with pytest.raises(ValueError, match="JointThreshold"):
        replayed(folder, replace(log, header=header))
    with pytest.raises(ValueError, match="`dtype` is 'int4'"):
        replayed(folder, replace(log, header=replace(log.header, dtype="int4")))
    asked = replace(log.requests[3], sampling={"max_new_tokens": 4, "stop": ["."]})
    with pytest.raises(ValueError, match="request 3 has `stop`"):
        replayed(folder, replace(log, requests=[*log.requests[:3], asked, *log.requests[4:]]))


def test_a_stop_token_of_the_request_ends_its_answer_as_in_sglang(folder, log):
    """Which ignores it where `ignore_eos` is true: `Req._check_token_based_finish` of SGLang 0.5.23."""
    request = log.requests[0]
    sampling = request.sampling | {"stop_token_ids": [request.output[3]]}
    cut = replace(request, sampling=sampling | {"ignore_eos": False}, output=request.output[:4], finish_reason="stop")
    whole = replace(request, sampling=sampling | {"ignore_eos": True})
    for stopped in (cut, whole):
        report = replayed(folder, replace(log, requests=[stopped, *log.requests[1:]]))
        assert report.requests_equal == 9


def test_a_report_has_both_sides_and_a_picture(folder, log, tmp_path):
    report = replayed(folder, log)
    write_report(tmp_path / "drift.md", log, report, versions() | {"dtype": "float32"})
    text = (tmp_path / "drift.md").read_text()
    assert "| dtype | float32 | float32 |" in text
    assert "| version | 0.5.23 |" in text
    assert "- steps equal: 89 of 89" in text
    assert "(drift.png)" in text
    assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_replays_a_log_and_exits_with_1_where_the_algorithms_differ(folder, log, tmp_path):
    done = command("replay", LOGS[0], "--model", folder)
    assert done.returncode == 0, done.stderr
    assert "requests equal: 9 of 9\nsteps equal: 89 of 89" in done.stdout
    other = replace(log, header=replace(log.header, algorithm=log.header.algorithm | {"threshold": 0.5}))
    write_log(tmp_path / "log.jsonl", other)
    done = command("replay", tmp_path / "log.jsonl", "--model", folder)
    assert done.returncode == 1
    assert "algorithmic: request" in done.stdout
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((ROOT / "checkpoints/clover-tiny/model.safetensors").read_bytes())
    done = command("replay", LOGS[0], "--model", tmp_path)
    assert done.returncode == 2
    assert "fingerprint" in done.stderr


def status_and_error(monkeypatch, capsys, *arguments) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["clover.parity", *map(str, arguments)])
    status = main()
    return status, capsys.readouterr().err


def test_what_cannot_be_compared_is_status_2_and_one_message(folder, log, tmp_path, monkeypatch, capsys):
    def run(*arguments):
        return status_and_error(monkeypatch, capsys, *arguments)

    status, error = run("replay", LOGS[0], "--model", folder, "--device", "cuda:99")
    assert status == 2 and "`--device` is 'cuda:99'" in error
    status, error = run("replay", LOGS[0], "--model", folder, "--device", "nowhere")
    assert status == 2 and "`--device` is 'nowhere'" in error
    outside = replace(log.requests[-1], prompt=[2**30])
    write_log(tmp_path / "log.jsonl", replace(log, requests=[*log.requests[:-1], outside], steps=[], commits=[]))
    status, error = run("replay", tmp_path / "log.jsonl", "--model", folder)
    assert status == 2 and "request 8 has the token 1073741824, but" in error
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    status, error = run("replay", LOGS[0], "--model", tmp_path)
    assert status == 2 and f"the weights in {tmp_path} cannot be read" in error
    (tmp_path / "config.json").write_text("[1]")
    status, error = run("replay", LOGS[0], "--model", tmp_path)
    assert status == 2 and "config.json holds no object" in error
    (tmp_path / "raw.json").write_text("[1")
    status, error = run("convert", tmp_path / "raw.json", tmp_path / "out.jsonl", "--model", folder)
    assert status == 2 and "raw.json: no JSON" in error
    status, error = run("convert", tmp_path / "raw.json", tmp_path / "raw.json", "--model", folder)
    assert status == 2 and "raw.json is there already" in error
    status, error = run("record-class", tmp_path / "nowhere" / "log", "--model", folder)
    assert status == 2 and "nowhere is no folder" in error


CLASS_REQUESTS = {
    "what only an engine has": ({"top_p": 0.5}, "request 0 has `top_p`"),
    "a temperature": ({"temperature": 1}, "`temperature` 1, but the class is greedy"),
}


@pytest.mark.parametrize("name", CLASS_REQUESTS)
def test_record_class_refuses_what_it_would_leave_out(name, tmp_path, monkeypatch, capsys):
    sampling, message = CLASS_REQUESTS[name]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"input_ids": [5], "sampling_params": sampling}) + "\n")
    arguments = ("--model", ROOT / "checkpoints" / "clover-tiny", "--prompts", tmp_path / "prompts.jsonl")
    status, error = status_and_error(monkeypatch, capsys, "record-class", tmp_path / "log.jsonl", *arguments)
    assert status == 2 and message in error
    assert not (tmp_path / "log.jsonl").exists()


# ---- raw recordings --------------------------------------------------------------------------------------------------

RID = {"meta_info": {"id": "a", "finish_reason": {"type": "length", "length": 3}}, "output_ids": [7, 8, 9]}
EVENT = {
    "event": "step",
    "mask_id": 99,
    "rids": ["a"],
    "positions": [[0, 1, 2, 3]],
    "block_in": [[5, 99, 99, 99]],
    "block_out": [[5, 7, 99, 9]],
    "argmax": [[5, 7, 6, 9]],
    "confidence": [[0.1, 0.7, 0.2, 0.9]],
    "argmax_margin": [[1.0, 2.0, 0.5, 3.0]],
}
RAW = {
    "sglang": "0.5.23",
    "torch": "2.13.0",
    "transformers": "5.19.0",
    "engine_args": {
        "dllm_algorithm": "LowConfidence",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "device": "cpu",
        "random_seed": 0,
    },
    "algorithm_config": {"threshold": 0.6, "block_size": 4},
    "runs": [{"request": {"input_ids": [5], "sampling_params": {"max_new_tokens": 3}}, "response": RID}],
    "steps": [EVENT, EVENT | {"block_in": [[5, 7, 8, 9]], "block_out": [[5, 7, 8, 9]]}, {"event": "result"}],
}


def test_a_raw_recording_becomes_requests_steps_and_commits(folder):
    log = convert(RAW, folder)
    assert [(r.prompt, r.output, r.finish_reason) for r in log.requests] == [([5], [7, 8, 9], "length")]
    (step,), (commit,) = log.steps, log.commits
    assert (step.block, step.step, step.before, step.after) == (0, 0, [5, 99, 99, 99], [5, 7, 99, 9])
    assert (step.tokens, step.confidences) == ([None, 7, 6, 9], [None, 0.7, 0.2, 0.9])
    assert step.margins == [None, 2.0, 0.5, 3.0]
    assert (commit.block, commit.tokens) == (0, [5, 7, 8, 9])
    assert log.header.model["fingerprint"] == fingerprint(folder)


@pytest.mark.parametrize("name", ["sglang", "runs", "steps", "engine_args", "algorithm_config"])
def test_a_recording_that_lacks_something_is_refused(name, folder):
    with pytest.raises(ValueError, match=f"no '{name}'"):
        convert({key: value for key, value in RAW.items() if key != name}, folder)


MISSHAPEN = {
    "a list": [1],
    "steps that are none": RAW | {"steps": 5},
    "an event that is none": RAW | {"steps": [5]},
    "positions that are none": RAW | {"steps": [EVENT | {"positions": []}]},
    "settings that are none": RAW | {"algorithm_config": 5},
    "no request": RAW | {"runs": [5]},
    "another one's mask token": RAW | {"steps": [EVENT | {"mask_id": 98}]},
}


@pytest.mark.parametrize("name", MISSHAPEN)
def test_a_recording_of_another_shape_is_refused(name, folder, tmp_path):
    config = json.loads((folder / "config.json").read_text()) | {"mask_token_id": 99}
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="the recording (is not as|has)"):
        convert(MISSHAPEN[name], tmp_path)


def test_settings_that_a_log_cannot_have_are_refused_when_it_is_written(folder, tmp_path):
    with pytest.raises(ValueError, match="`threshold` is None"):
        write_log(tmp_path / "log.jsonl", convert(RAW | {"algorithm_config": {"block_size": 4}}, folder))


def test_a_step_of_an_unknown_request_is_refused(folder):
    with pytest.raises(ValueError, match="step 0 is of request 'b'"):
        convert(RAW | {"steps": [EVENT | {"rids": ["b"]}]}, folder)
