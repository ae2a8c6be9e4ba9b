"""The recorder: nothing is lost, asked twice or believed unchecked; and what it records of a real SGLang replays."""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from misbehaving_server import (
    MASK,
    VOCABULARY,
    answer_to,
    behaving,
    cut,
    ended_early,
    failing,
    hanging_up,
    misbehaving_server,
    saying,
    silent,
    stream_of,
)
from safetensors.torch import save_file
from sglang_server import SITE_CPU, free_port, install_observer, needs_sglang, sglang_server

from clover.parity import record as recorder
from clover.parity import sglang_client
from clover.parity.fingerprint import fingerprint
from clover.parity.log import read_log
from clover.parity.models import open_model
from clover.parity.partial import Partial
from clover.parity.prompts import read_requests
from clover.parity.record import record
from clover.parity.replay import replay
from clover.parity.sglang_client import Refused, Server, Unusable, joined
from clover.parity.tiny_sdar import MASK as SDAR_MASK
from clover.parity.tiny_sdar import write_tiny_sdar

ROOT = Path(__file__).parents[1]
NOTHING = {"algorithm": None, "threshold": None, "block_size": None, "mask_token_id": None}
BOTH_WAYS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture
def server():
    with misbehaving_server() as running:
        yield running


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


def write_model(folder: Path, weight: float = 0.0, **changes) -> Path:
    folder.mkdir()
    config = {"architectures": ["SDARForCausalLM"], "vocab_size": VOCABULARY, "mask_token_id": MASK, "eos_token_id": 7}
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    save_file({"weight": torch.full((2,), weight)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path / "prompts.jsonl", [[1, 2, 3], [4, 5], [6, 7, 8, 9]])


def write_prompts(path: Path, prompts: list[list[int]], budget: int = 6) -> Path:
    lines = ({"input_ids": ids, "sampling_params": {"max_new_tokens": budget}} for ids in prompts)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def out(tmp_path):
    return tmp_path / "log.jsonl"


def partial_of(out: Path) -> Path:
    return out.with_name("log.jsonl.partial")


def kept(out: Path) -> int:
    return len(partial_of(out).read_text().splitlines()) - 1  # the first line says what is recorded


def recorded(server, prompts, model, out, *, tries=4, timeout=30, given=NOTHING, **options):
    return record(Server(server.url, timeout, tries, pause=0), prompts, model, out, given, **options)


def assert_whole(out: Path, server, prompts: Path) -> None:
    """The log has every request with what the server says when it behaves, and nothing else is left behind."""
    log = read_log(out)
    asked = [json.loads(line)["input_ids"] for line in prompts.read_text().splitlines()]
    assert [request.prompt for request in log.requests] == asked
    for request in log.requests:
        body = {"input_ids": request.prompt, "sampling_params": request.sampling}
        assert request.output == answer_to(body)["output_ids"]
    assert [path.name for path in out.parent.glob("log*")] == ["log.jsonl"]


def prompts_asked(server) -> list[list[int]]:
    return [body["input_ids"] for body in server.asked]


# ---- what is asked and written ---------------------------------------------------------------------------------------


@BOTH_WAYS
def test_every_request_is_asked_once_and_logged_with_what_the_server_and_the_checkpoint_say(
    server, prompts, model, out, stream
):
    recorded(server, prompts, model, out, stream=stream)
    assert_whole(out, server, prompts)
    assert prompts_asked(server) == [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    assert all(body["stream"] is stream for body in server.asked)
    header = read_log(out).header
    assert header.engine == {"name": "sglang", "version": "0.0"}
    assert header.algorithm == {"name": "LowConfidence", "threshold": 0.9, "block_size": 4}
    assert header.model["mask_token_id"] == MASK
    assert header.model["eos_token_ids"] == [7, 8]  # SGLang stops at those of generation_config.json too
    assert header.model["fingerprint"] == fingerprint(model)
    assert (header.dtype, header.seed) == ("float32", 0)
    assert read_log(out).requests[0].sampling == {"max_new_tokens": 6, "temperature": 0}


def test_a_server_s_key_is_sent_and_its_secrets_are_not_logged(server, prompts, model, out, monkeypatch):
    monkeypatch.setenv("SGLANG_API_KEY", "mine")
    recorded(server, prompts, model, out)
    assert server.keys == ["Bearer mine"] * 3
    assert "secret" not in out.read_text() and "mine" not in out.read_text()


def test_an_older_server_s_names_of_its_endpoints_are_tried_too(server, prompts, model, out):
    server.prefix = "get_"
    recorded(server, prompts, model, out)
    assert_whole(out, server, prompts)


def test_a_stream_of_increments_is_put_together(server, prompts, model, out):
    server.info["incremental_streaming_output"] = True

    def increments(handler, body):
        ids, (*parts, last) = answer_to(body)["output_ids"], stream_of(answer_to(body))
        ends = [len(part["output_ids"]) for part in parts]
        cuts = zip([0, *ends], [*ends, len(ids)], strict=True)
        handler.stream([e | {"output_ids": ids[a:b]} for e, (a, b) in zip([*parts, last], cuts, strict=True)])

    server.behaviours = [increments] * 3
    recorded(server, prompts, model, out, stream=True)
    assert_whole(out, server, prompts)


def test_a_text_is_asked_as_the_ids_of_the_checkpoint_s_tokenizer(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Once"}\n')
    (request,) = read_requests(tmp_path / "prompts.jsonl", ROOT / "checkpoints" / "clover-tiny", 9)
    assert request["input_ids"] and request["sampling_params"] == {"max_new_tokens": 9, "temperature": 0}


BAD_LINES = {
    "a misspelt field": ('{"input_ids": [1], "sampling_param": {}}', "unknown field `sampling_param`"),
    "a token outside the vocabulary": ('{"input_ids": [50]}', "outside the vocabulary of 50"),
    "no budget": ('{"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}', "`max_new_tokens` is 0"),
    "several answers": ('{"input_ids": [1], "sampling_params": {"n": 2}}', "`n` is 2"),
    "a prompt twice": ('{"input_ids": [1], "prompt": "one"}', "and not both"),
    "a text without a tokenizer": ('{"prompt": "one"}', "okenizer"),
    "nested too deeply": ("[" * 100_000, "nested too deeply"),
    "no object of parameters": ('{"input_ids": [1], "sampling_params": []}', "`sampling_params` is \\[\\]"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_line_that_cannot_be_logged_is_refused_before_anything_is_asked(name, server, model, prompts, out):
    line, message = BAD_LINES[name]
    prompts.write_text('{"input_ids": [1]}\n' + line + "\n")
    with pytest.raises(ValueError, match=f"prompts.jsonl, line 2: .*{message}"):
        recorded(server, prompts, model, out)
    assert not server.asked and not partial_of(out).exists()


def test_what_nobody_says_is_named_and_can_be_given(server, prompts, tmp_path, out):
    server.info |= {"dllm_algorithm_config": "settings.yaml"}  # a file of the server's own
    model = write_model(tmp_path / "other", mask_token_id=None)
    with pytest.raises(ValueError, match="give --threshold, --block-size, --mask-token-id$"):
        recorded(server, prompts, model, out)
    assert not server.asked
    given = NOTHING | {"threshold": 0.5, "block_size": 8, "mask_token_id": 49}
    recorded(server, prompts, model, out, given=given)
    header = read_log(out).header
    assert header.algorithm == {"name": "LowConfidence", "threshold": 0.5, "block_size": 8}
    assert header.model["mask_token_id"] == 49


def test_a_given_setting_that_the_server_contradicts_is_refused(server, prompts, model, out):
    with pytest.raises(ValueError, match="--threshold is 0.5, but the server or the checkpoint says 0.9"):
        recorded(server, prompts, model, out, given=NOTHING | {"threshold": 0.5})


def test_a_server_of_another_kind_of_model_is_refused(server, prompts, model, out):
    server.served = {"architectures": ["LlamaForCausalLM"]}
    with pytest.raises(ValueError, match="LlamaForCausalLM.*SDARForCausalLM"):
        recorded(server, prompts, model, out)


@pytest.mark.parametrize(
    ("said", "own", "dtype"),
    [
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float32", "float16"),  # so SGLang has it
        ("half", "float32", "float16"),
        ("float32", "bfloat16", "float32"),
    ],
)
def test_the_logged_type_is_the_one_the_server_computes_in(said, own, dtype):
    assert recorder.dtype_of({"dtype": said}, {"dtype": own}) == dtype


# ---- what goes wrong -------------------------------------------------------------------------------------------------

PASSING = {
    "a server's fault": failing(500),
    "an overloaded server": failing(503),
    "a cut answer": cut,
    "an answer that ends early": ended_early,
    "no answer": hanging_up,
    "silence": silent,
    "no ids": saying(ids=[]),
    "text for ids": saying(ids=["a", "b"]),
    "a truth for an id": saying(ids=[True]),
    "a negative id": saying(ids=[1, -1], completion_tokens=2),
    "an id outside the vocabulary": saying(ids=[1, 50], completion_tokens=2),
    "too many ids": saying(ids=[1] * 7, completion_tokens=7),
    "a lost id": saying(ids=[1, 2, 3, 4, 5], completion_tokens=6),
    "another prompt": saying(prompt_tokens=17),
    "no end": saying(finish_reason=None),
    "an unknown end": saying(finish_reason={"type": "bored"}),
    "an abort": saying(finish_reason={"type": "abort", "message": "Aborted"}),
    "an abort of a fault": saying(finish_reason={"type": "abort", "status_code": 503}),
    "nothing beside the ids": saying(id=..., finish_reason=...),
}


@BOTH_WAYS
@pytest.mark.parametrize("name", PASSING)
def test_what_fails_for_a_while_is_asked_again(name, server, prompts, model, out, stream):
    server.behaviours = [behaving, PASSING[name], PASSING[name]]
    recorded(server, prompts, model, out, stream=stream, timeout=0.5 if name == "silence" else 30)
    assert_whole(out, server, prompts)
    assert prompts_asked(server) == [[1, 2, 3], [4, 5], [4, 5], [4, 5], [6, 7, 8, 9]]


@BOTH_WAYS
@pytest.mark.parametrize("name", ["a server's fault", "a cut answer", "no answer", "an id outside the vocabulary"])
def test_what_keeps_failing_is_an_error_that_names_the_request_and_what_came_before_is_kept(
    name, server, prompts, model, out, stream
):
    server.behaviours = [behaving, *[PASSING[name]] * 4]
    with pytest.raises(Unusable, match="^request 1, try 4 of 4: "):
        recorded(server, prompts, model, out, stream=stream)
    assert len(server.asked) == 5 and kept(out) == 1 and not out.exists()
    recorded(server, prompts, model, out, stream=stream)
    assert_whole(out, server, prompts)
    assert prompts_asked(server)[5:] == [[4, 5], [6, 7, 8, 9]]


def refusing_in_the_stream(handler, body):
    """As SGLang does: the status is sent before the request is looked at."""
    handler.stream([{"error": {"message": "too long", "code": 400, "retryable": False}}])


@pytest.mark.parametrize(
    ("behaviour", "stream"),
    [
        (failing(400, "too long"), False),
        (failing(400, "too long"), True),
        (failing(401, "too long"), False),
        (refusing_in_the_stream, True),
        (saying(finish_reason={"type": "abort", "status_code": 400, "message": "too long"}), True),
    ],
)
def test_what_the_server_refuses_is_not_asked_again(behaviour, stream, server, prompts, model, out):
    server.behaviours = [behaving, behaviour]
    with pytest.raises(Refused, match="^request 1: .*too long"):
        recorded(server, prompts, model, out, stream=stream)
    assert len(server.asked) == 2 and kept(out) == 1


BAD_STREAMS = {
    "takes back": [[], [1, 2], [1, 3, 4]],
    "no finish reason": [[1], [1, 2]],
    "has the `output_ids` None": [[1], None],
    "cut after 0 ids": [],
}


@pytest.mark.parametrize("message", BAD_STREAMS)
def test_a_stream_that_contradicts_itself_is_not_believed(message):
    stream = [{"output_ids": ids, "meta_info": {"finish_reason": None}} for ids in BAD_STREAMS[message]]
    with pytest.raises(Unusable, match=message):
        joined(stream)


def test_a_stream_that_goes_on_after_its_end_is_not_believed():
    event = {"output_ids": [1], "meta_info": {"finish_reason": {"type": "stop"}}}
    with pytest.raises(Unusable, match="goes on"):
        joined([event, event])


def test_pauses_grow_up_to_half_a_minute(monkeypatch):
    pauses = []
    monkeypatch.setattr(sglang_client.time, "sleep", pauses.append)
    with pytest.raises(Unusable, match="^server_info, try 8 of 8: .*refused"):
        Server(f"http://127.0.0.1:{free_port()}").about("server_info")
    assert pauses == [1, 2, 4, 8, 16, 30, 30]


def test_a_server_that_is_not_up_yet_is_waited_for(prompts, model, out):
    port, running = free_port(), []

    def start_late():
        time.sleep(0.3)
        with misbehaving_server(port) as server:
            running.append(server)
            ended.wait(60)

    ended = threading.Event()
    thread = threading.Thread(target=start_late)
    thread.start()
    try:
        record(Server(f"127.0.0.1:{port}", 30, 8, pause=0.1), prompts, model, out, NOTHING)
    finally:
        ended.set()
        thread.join()
    assert_whole(out, running[0], prompts)


@pytest.mark.parametrize("url", ["ftp://host:1", "", "http://"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="`url`"):
        Server(url)


# ---- interruptions ---------------------------------------------------------------------------------------------------


@BOTH_WAYS
def test_a_killed_recorder_goes_on_and_asks_nothing_twice_that_was_answered(server, prompts, model, out, stream):
    arrived = threading.Event()

    def holding(handler, body):
        arrived.set()
        silent(handler, body)

    server.behaviours = [behaving, holding]
    options = {"stream": stream}
    process = multiprocessing.get_context("fork").Process(
        target=recorded, args=(server, prompts, model, out), kwargs=options
    )
    process.start()
    assert arrived.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert kept(out) == 1 and not out.exists()
    recorded(server, prompts, model, out, **options)
    assert_whole(out, server, prompts)
    assert prompts_asked(server) == [[1, 2, 3], [4, 5], [4, 5], [6, 7, 8, 9]]  # the second was never answered


def test_ctrl_c_keeps_what_is_answered(server, prompts, model, out, capsys):
    def interrupting(handler, body):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        silent(handler, body)

    server.behaviours = [behaving, behaving, interrupting]
    parser = argparse.ArgumentParser()
    recorder.add_arguments(parser)
    command = ["--url", server.url, "--prompts", str(prompts), "--model", str(model), "--out", str(out)]
    assert recorder.run(parser.parse_args(command)) == 130
    assert "goes on from there" in capsys.readouterr().err
    assert kept(out) == 2
    assert recorder.run(parser.parse_args(command)) == 0
    assert_whole(out, server, prompts)
    assert prompts_asked(server)[3:] == [[6, 7, 8, 9]]


def interrupted(server, prompts, model, out, answered=2):
    """A recording that has come as far as two answers."""
    server.behaviours = [*[behaving] * answered, failing(400)]
    with pytest.raises(Refused):
        recorded(server, prompts, model, out)
    server.asked.clear()


def test_an_answer_that_was_being_written_when_the_recorder_was_killed_is_asked_for_again(server, prompts, model, out):
    interrupted(server, prompts, model, out)
    data = partial_of(out).read_bytes()
    partial_of(out).write_bytes(data[:-20])
    recorded(server, prompts, model, out)
    assert_whole(out, server, prompts)
    assert prompts_asked(server) == [[4, 5], [6, 7, 8, 9]]


def test_a_recorder_killed_between_the_log_and_the_end_only_tidies_up(server, prompts, model, out):
    recorded(server, prompts, model, out)
    log = out.read_bytes()
    out.unlink()
    interrupted(server, prompts, model, out)
    recorded(server, prompts, model, out)
    assert out.read_bytes() == log


def test_a_recording_goes_on_with_a_server_that_was_started_again_elsewhere(server, prompts, model, out):
    interrupted(server, prompts, model, out)
    with misbehaving_server() as other:
        other.info["random_seed"] = 5
        recorded(other, prompts, model, out)
        assert_whole(out, other, prompts)


def changed_prompts(server, prompts, model):
    write_prompts(prompts, [[1, 2, 3], [4, 6], [6, 7, 8, 9]])


def further_prompts(server, prompts, model):
    write_prompts(prompts, [[1, 2, 3], [4, 5], [6, 7, 8, 9], [1]])


def another_server(server, prompts, model):
    server.info["version"] = "0.1"


def other_arguments(server, prompts, model):
    server.info["attention_backend"] = "triton"


def another_model(server, prompts, model):
    save_file({"weight": torch.ones(2)}, model / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (changed_prompts, "requests"),
        (further_prompts, "requests"),
        (another_server, "engine"),
        (other_arguments, "arguments"),
        (another_model, "model"),
    ],
)
def test_a_recording_is_not_continued_with_something_else(change, name, server, prompts, model, out):
    interrupted(server, prompts, model, out)
    before = partial_of(out).read_bytes()
    change(server, prompts, model)
    with pytest.raises(ValueError, match=f"was begun with another `{name}`"):
        recorded(server, prompts, model, out)
    assert not server.asked and partial_of(out).read_bytes() == before


def test_a_damaged_file_of_answers_is_refused(server, prompts, model, out):
    interrupted(server, prompts, model, out)
    lines = partial_of(out).read_text().splitlines(keepends=True)
    for damaged, message in (("{}\n", "line 2"), ("no\n", "is damaged")):
        partial_of(out).write_text("".join([lines[0], damaged, lines[2]]))
        with pytest.raises(ValueError, match=message):
            recorded(server, prompts, model, out)


def test_a_recording_of_which_nothing_was_answered_begins_anew(server, prompts, model, out):
    interrupted(server, prompts, model, out, answered=0)
    changed_prompts(server, prompts, model)
    recorded(server, prompts, model, out)
    assert [request.prompt for request in read_log(out).requests] == [[1, 2, 3], [4, 6], [6, 7, 8, 9]]


def test_two_recorders_do_not_write_one_log(server, prompts, model, out):
    with Partial(partial_of(out), {}, [{}]):
        with pytest.raises(ValueError, match="is being written by another recorder"):
            recorded(server, prompts, model, out)
    assert not server.asked


def test_a_recording_that_could_not_be_written_is_refused_before_anything_is_asked(server, prompts, model, tmp_path):
    with pytest.raises(ValueError, match="nowhere is no folder"):
        recorded(server, prompts, model, tmp_path / "nowhere" / "log.jsonl")
    assert not server.asked


def test_a_complete_log_is_not_recorded_over(server, prompts, model, out):
    recorded(server, prompts, model, out)
    with pytest.raises(ValueError, match="is there already"):
        recorded(server, prompts, model, out)


# ---- steps -----------------------------------------------------------------------------------------------------------


def event_of(name: str, start: int, before: list[int], after: list[int], **changes) -> dict:
    """A line of the observer: one token after another, as sure as can be."""
    settings = {"event": "step", "algorithm": "LowConfidence", "threshold": 0.9, "block_size": 4, "mask_id": MASK}
    rows = {"positions": [list(range(start, start + 4))], "block_in": [before], "block_out": [after]}
    choices = {"argmax": [after], "confidence": [[1.0] * 4], "argmax_margin": [[5.0] * 4]}
    return settings | {"rank": 0, "rids": [name]} | rows | choices | changes


def steps_of(prompt: list[int], budget: int = 6) -> list[dict]:
    """What the observer would have seen of one request: each block is filled in one step, and passed once more."""
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": budget}}
    text = prompt + answer_to(body)["output_ids"] + [3] * 4
    events = []
    for start in range(0, len(prompt) + budget, 4):
        whole = text[start : start + 4]
        before = [MASK if start + i >= len(prompt) else token for i, token in enumerate(whole)]
        events += [event_of(f"of {prompt}", start, before, whole)] if MASK in before else []
        events.append(event_of(f"of {prompt}", start, whole, whole))
    return events


def write_steps(path: Path, events: list[dict]) -> Path:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


@pytest.fixture
def observed():
    return [*steps_of([1, 2, 3]), *steps_of([4, 5]), *steps_of([6, 7, 8, 9])]


def test_steps_are_brought_together_with_the_answers(server, prompts, model, out, tmp_path, observed):
    server.info |= {"dllm_algorithm_config": "settings.yaml"}  # the steps say what is in it
    recorded(server, prompts, model, out, steps=write_steps(tmp_path / "steps.jsonl", observed))
    log = read_log(out)
    assert log.header.algorithm == {"name": "LowConfidence", "threshold": 0.9, "block_size": 4}
    assert [(s.request, s.block, s.step) for s in log.steps] == [
        *[(0, 0, 0), (0, 1, 0), (0, 2, 0)],
        *[(1, 0, 0), (1, 1, 0)],
        *[(2, 1, 0), (2, 2, 0)],
    ]
    assert [(c.request, c.block) for c in log.commits if c.request == 2] == [(2, 1)]  # not the prompt's, nor the last
    assert log.steps[0].before == [1, 2, 3, MASK] and log.steps[0].tokens == [None, None, None, 6]


def test_steps_of_others_and_of_further_ranks_are_left_out(server, prompts, model, out, tmp_path, observed):
    recorded(server, prompts, model, out, steps=write_steps(tmp_path / "alone.jsonl", observed))
    alone = out.read_bytes()
    out.unlink()
    stranger = event_of("somebody's", 0, [MASK] * 4, [1] * 4, threshold=0.1)
    both = {key: observed[0][key] + stranger[key] for key in ("rids", "positions", "block_in", "block_out")}
    both |= {key: observed[0][key] + stranger[key] for key in ("argmax", "confidence", "argmax_margin")}
    ranks = [event | {"rank": rank} for event in observed[1:] for rank in (0, 1)]
    steps = write_steps(tmp_path / "steps.jsonl", [stranger, {"event": "other"}, observed[0] | both, *ranks])
    with open(steps, "a") as file:
        file.write('{"event": "st')  # being written just now
    recorded(server, prompts, model, out, steps=steps)
    assert out.read_bytes() == alone


def lost(events):
    return events[:2] + events[4:]


def of_another_server(events):
    return [event | {"rids": ["somebody's"]} for event in events]


def of_two_servers(events):
    return [*events[:-1], events[-1] | {"threshold": 0.5}]


def of_no_observer(events):
    return [*events, {"step": 1}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lost, "request 0 was answered with .*, but its steps lead to"),
        (of_two_servers, "different settings"),
        (of_another_server, "request 0 was answered with .*, but its steps lead to .None"),
        (of_no_observer, "line 16: no step of the observer"),
    ],
)
def test_steps_that_do_not_fit_are_an_error_and_no_answer_is_lost(
    change, message, server, prompts, model, out, tmp_path, observed
):
    steps = write_steps(tmp_path / "steps.jsonl", change(observed))
    with pytest.raises(ValueError, match=message):
        recorded(server, prompts, model, out, steps=steps)
    assert not out.exists() and kept(out) == 3
    recorded(server, prompts, model, out, steps=write_steps(steps, observed))
    assert len(read_log(out).steps) == 7 and len(server.asked) == 3


def test_steps_that_come_later_are_added_without_asking_again(server, prompts, model, out, tmp_path, observed):
    with pytest.raises(FileNotFoundError):
        recorded(server, prompts, model, out, steps=tmp_path / "steps.jsonl")
    recorded(server, prompts, model, out, steps=write_steps(tmp_path / "steps.jsonl", observed))
    assert len(read_log(out).steps) == 7 and len(server.asked) == 3


# ---- the plugin ------------------------------------------------------------------------------------------------------


class Algorithm:
    """As much of SGLang's class as the observer sees: its step fills all masks with the likeliest token."""

    threshold, block_size, mask_id, fdfo = 0.9, 4, 9, True

    def step(self, batch, logits, states):
        batch.input_ids.copy_(torch.where(batch.input_ids == self.mask_id, logits.argmax(-1), batch.input_ids))
        return ["what the step returns"]


@pytest.fixture
def observer(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "parity" / "sglang_observer")
    monkeypatch.setenv("CLOVER_STEPS", str(tmp_path / "steps.jsonl"))
    import clover_sglang_observer

    yield clover_sglang_observer
    del sys.modules["clover_sglang_observer"]


def batch_of(*ids: int) -> SimpleNamespace:
    return SimpleNamespace(input_ids=torch.tensor(ids), positions=torch.arange(4), rids=["a"], batch_size=1)


def test_the_observer_writes_a_step_and_leaves_it_as_it_is(observer, tmp_path):
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    logits[1, 9] = 5.0  # the mask token is the likeliest
    alone, seen, algorithm = batch_of(1, 9, 9, 2), batch_of(1, 9, 9, 2), Algorithm()
    Algorithm().step(alone, logits.clone(), [])
    observer.observe(None, algorithm)
    assert algorithm.step(seen, logits, []) == ["what the step returns"]
    assert torch.equal(seen.input_ids, alone.input_ids)
    algorithm.excludes_mask_token = True
    algorithm.step(batch_of(1, 9, 9, 2), logits, [])
    plain, excluding = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert (plain["block_in"], plain["block_out"]) == ([[1, 9, 9, 2]], [seen.input_ids.tolist()])
    assert plain["argmax"] == [logits.argmax(-1).tolist()]
    assert plain["confidence"] == [pytest.approx(logits.softmax(-1).amax(-1).tolist())]
    second = logits[1, :9].argmax().item()
    assert excluding["argmax"][0][1] == second
    assert excluding["confidence"][0][1] == pytest.approx(logits.softmax(-1)[1, second].item())
    assert {"rank": 0, "threshold": 0.9, "algorithm": "Algorithm", "rids": ["a"]}.items() <= plain.items()


def test_the_observer_does_nothing_unless_a_file_is_named(observer, monkeypatch):
    monkeypatch.delenv("CLOVER_STEPS")
    observer.activate()  # would import SGLang otherwise


# ---- a real SGLang ---------------------------------------------------------------------------------------------------


@needs_sglang
@pytest.mark.parametrize(("block_size", "arguments"), [(4, []), (8, ["--no-dllm-fdfo"])], ids=["fdfo", "sync"])
def test_a_real_sglang_recorded_whole_and_streamed_gives_one_log_that_replays_equal(tmp_path, block_size, arguments):
    model = write_tiny_sdar(tmp_path / "sdar")
    steps, prompts = tmp_path / "steps.jsonl", tmp_path / "prompts.jsonl"
    lines = [
        {"input_ids": [100, 107, 114], "sampling_params": {"max_new_tokens": 12, "ignore_eos": True}},
        {"input_ids": [101 + 7 * i % 60 for i in range(10)], "sampling_params": {"max_new_tokens": 7}},
        {"input_ids": [103 + 5 * i % 60 for i in range(8)], "sampling_params": {"max_new_tokens": 32}},
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths = [SITE_CPU, install_observer(tmp_path)]
    logs = {}
    options = {"paths": paths, "environment": {"CLOVER_STEPS": str(steps)}, "arguments": arguments}
    with sglang_server(model, tmp_path, threshold=0.6, block_size=block_size, **options) as url:
        server = Server(url)
        for name, stream in (("whole", False), ("streamed", True)):
            logs[name] = record(server, prompts, model, tmp_path / name, NOTHING, stream=stream, steps=steps)
        plain = record(server, prompts, model, tmp_path / "plain", NOTHING | settings_of(logs["whole"]))
        too_long = tmp_path / "too_long.jsonl"
        too_long.write_text(json.dumps({"input_ids": [100] * 600}) + "\n")
        for stream in (False, True):
            with pytest.raises(Refused, match="request 0: .*600"):
                record(server, too_long, model, tmp_path / "refused", NOTHING | settings_of(plain), stream=stream)
    log = logs["whole"]
    assert log == logs["streamed"]
    assert read_log(tmp_path / "plain") == replace(log, steps=[], commits=[])
    assert log.header.algorithm == {"name": "LowConfidence", "threshold": 0.6, "block_size": block_size}
    assert log.header.model["mask_token_id"] == SDAR_MASK
    report = replay(log, open_model(model, block_size))
    assert report.requests_equal == report.requests == 3
    assert report.steps_equal == len(report.comparisons) == len(log.steps) - report.not_replayed > 10
    assert not report.divergences and max(report.differences) < 1e-3


def settings_of(log) -> dict:
    """What has to be given where no steps are observed."""
    algorithm = log.header.algorithm
    return {name: algorithm[name] for name in ("threshold", "block_size")} | {"mask_token_id": SDAR_MASK}
