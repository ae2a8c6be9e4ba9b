"""SGLang 0.5.23 serves a Clover through `parity/sglang_plugin`, and its steps are those of this repository's loop.

The committed logs are of SGLang's engine on a CPU; they are replayed here without SGLang. Where CLOVER_SGLANG_PYTHON
names a python that has SGLang, the engine and the server are run too (minutes), and what is refused is tried. One
checkpoint has attention only. The other has Gated DeltaNet layers: scheduler, memory and backend are SGLang's, but its
GDN kernels are for GPUs, and on a CPU those of `site_cpu` stand in for them.
"""

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from run_sglang_engine import requests
from sglang_server import sglang_server
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import torch_chunk_gated_delta_rule

from clover.parity.fingerprint import fingerprint
from clover.parity.log import Log, read_log
from clover.parity.models import open_model
from clover.parity.record import record
from clover.parity.replay import Report, replay
from clover.parity.sglang_client import Server
from clover.parity.sglang_raw import convert
from clover.parity.tiny_clover import BLOCK, KINDS, MASK, VOCAB, write_tiny_clover

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "parity" / "sglang_plugin"
SGLANG = os.environ.get("CLOVER_SGLANG_PYTHON")
WITH_SGLANG = pytest.mark.skipif(SGLANG is None, reason="CLOVER_SGLANG_PYTHON names no python with SGLang 0.5.23")
NOISE = 1e-5  # between fp32 passes on two engines; a fault in the model moves confidences by 0.01 and more
LOGS = {kind: ROOT / "parity" / "logs" / f"sglang-0.5.23-clover-{kind}.jsonl" for kind in KINDS}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    return write_tiny_clover(tmp_path_factory.mktemp("clover"), kind)


@pytest.fixture(scope="module")
def log(kind):
    return read_log(LOGS[kind])


def check_equal(report: Report, log: Log) -> None:
    assert not report.divergences
    assert report.requests_equal == report.requests == len(log.requests)
    assert report.steps_equal == len(report.comparisons) == len(log.steps) - report.not_replayed
    assert max(report.differences) < NOISE


# ---- the committed logs ----------------------------------------------------------------------------------------------


def test_the_log_is_of_this_checkpoint_and_holds_every_way_a_step_can_go(folder, log):
    assert log.header.model["fingerprint"] == fingerprint(folder)
    assert log.header.model["mask_token_id"] == MASK
    assert log.header.algorithm["block_size"] == BLOCK
    assert log.header.notes["engine_args"]["dllm_algorithm"] == "CloverLowConfidence"
    threshold = log.header.algorithm["threshold"]
    filled = [sum(a != b for a, b in zip(s.before, s.after, strict=True)) for s in log.steps]
    sure = [any(c is not None and c > threshold for c in s.confidences) for s in log.steps]
    assert sum(count > 1 for count in filled) > 50
    assert sum(count == 1 and not any_sure for count, any_sure in zip(filled, sure, strict=True)) > 10
    assert {len(r.prompt) % BLOCK == 0 for r in log.requests} == {True, False}
    assert min(len(r.prompt) for r in log.requests) < BLOCK
    assert {r.finish_reason for r in log.requests} == {"stop", "length"}


def test_every_request_and_every_step_of_the_log_is_equal(folder, log):
    check_equal(replay(log, open_model(folder, BLOCK)), log)


def test_requests_that_ran_together_were_answered_as_alone(log):
    """The log's second half is one batch of its first half, in which rows of several requests were denoised at once."""
    requests, half = log.requests, len(log.requests) // 2
    for alone, together in zip(requests[:half], requests[half:], strict=True):
        assert (alone.prompt, alone.sampling) == (together.prompt, together.sampling)
        assert (alone.output, alone.finish_reason) == (together.output, together.finish_reason)


# ---- SGLang's GDN kernels on a CPU -----------------------------------------------------------------------------------


def stand_ins():
    spec = importlib.util.spec_from_file_location("stand_ins", PLUGIN / "site_cpu" / "sgl_kernel" / "mamba.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_stand_in_of_the_delta_rule_computes_what_transformers_computes():
    """Two rows of 5 and 3 tokens in slots 2 and 0 of a pool, whose states are (d_v, d_k) there and (d_k, d_v) here."""
    torch.manual_seed(0)
    lengths, slots, (tokens, keys, heads, d_k, d_v) = [5, 3], [2, 0], (8, 2, 4, 6, 3)
    q, k, v = torch.randn(1, tokens, keys, d_k), torch.randn(1, tokens, keys, d_k), torch.randn(1, tokens, heads, d_v)
    g, beta, pool = -torch.rand(1, tokens, heads), torch.rand(1, tokens, heads), torch.randn(4, heads, d_v, d_k)
    before, after = pool.clone(), pool.clone()
    output, _, _ = stand_ins().chunk_gated_delta_rule_cpu(
        q,
        k,
        v,
        g,
        beta,
        initial_state=after,
        initial_state_indices=torch.tensor(slots),
        cu_seqlens=torch.tensor([0, 5, 8]),
        head_first=False,
        use_qk_l2norm_in_kernel=True,
    )
    q, k = q.repeat_interleave(2, dim=2), k.repeat_interleave(2, dim=2)
    for slot, rows in zip(slots, torch.arange(tokens).split(lengths), strict=True):
        expected, state = torch_chunk_gated_delta_rule(
            *(x[:, rows] for x in (q, k, v)),
            g=g[:, rows],
            beta=beta[:, rows],
            initial_state=before[slot : slot + 1].mT,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(output[:, rows], expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(after[slot], state[0].mT, rtol=0, atol=1e-5)
    assert torch.equal(after[[1, 3]], before[[1, 3]])


def test_the_stand_in_of_the_convolution_goes_on_from_its_slot_and_leaves_its_last_inputs_there():
    torch.manual_seed(0)
    weight, x, pool = torch.randn(6, 4), torch.randn(6, 7), torch.randn(3, 6, 3)
    arguments = {"activation": "silu", "conv_states": pool, "cache_indices": torch.tensor([1])}
    whole = stand_ins().causal_conv1d_fn_cpu(
        x,
        weight,
        None,
        has_initial_state=torch.tensor([False]),
        query_start_loc=torch.tensor([0, 7]),
        **arguments,
    )
    padded = torch.nn.functional.pad(x, (3, 0)).unfold(1, 4, 1)  # (C, N, K)
    torch.testing.assert_close(whole, torch.nn.functional.silu((padded * weight[:, None]).sum(-1)))
    assert torch.equal(pool[1], x[:, -3:])
    pool[1] = x[:, 1:4]
    rest = stand_ins().causal_conv1d_fn_cpu(
        x[:, 4:],
        weight,
        None,
        has_initial_state=torch.tensor([True]),
        query_start_loc=torch.tensor([0, 3]),
        **arguments,
    )
    torch.testing.assert_close(rest, whole[:, 4:])


# ---- SGLang itself ---------------------------------------------------------------------------------------------------

VARIABLES = {
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "clover.parity.sglang_plugin",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_MAMBA_CONV_DTYPE": "float32",  # of the convolution's states, which are bf16 by default
    "OMP_NUM_THREADS": "1",
}


def paths(folder: Path) -> list[Path]:
    """Where SGLang finds `clover`, the plugin, the observer of steps and, on a CPU, the stand-ins."""
    (folder / "clover").symlink_to(ROOT, target_is_directory=True)
    observer = folder / "clover_sglang_observer-0.1.0.dist-info"  # as `pip install parity/sglang_observer` would write
    observer.mkdir()
    (observer / "METADATA").write_text("Metadata-Version: 2.1\nName: clover-sglang-observer\nVersion: 0.1.0\n")
    (observer / "entry_points.txt").write_text("[sglang.srt.plugins]\nobserver = clover_sglang_observer:activate\n")
    return [folder, PLUGIN / "site", PLUGIN / "site_cpu", ROOT / "parity" / "sglang_observer"]


def run_with_sglang(folder: Path, *arguments: object) -> None:
    """Runs `run_sglang_engine.py` in SGLang's python."""
    environment = os.environ | VARIABLES | {"PYTHONPATH": os.pathsep.join(map(str, paths(folder)))}
    command = [SGLANG, ROOT / "tests" / "run_sglang_engine.py", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@WITH_SGLANG
@pytest.mark.parametrize("layers, mode", [("attention", "fdfo"), ("attention", "sync"), ("hybrid", "fdfo")])
def test_sglangs_engine_takes_the_steps_of_our_loop(layers, mode, tmp_path):
    model, out = write_tiny_clover(tmp_path / "model", layers), tmp_path / "raw.json"
    run_with_sglang(tmp_path, "record", model, out, mode, "0.6")
    recording = json.loads(out.read_text())
    assert "greedy" in recording["refused"]
    assert recording["steps_at_the_mask_token_are_ours"]
    log = convert(recording, model)
    check_equal(replay(log, open_model(model, BLOCK)), log)


# ---- what is refused -------------------------------------------------------------------------------------------------


def greedy(names: str) -> str:
    return f"CloverLowConfidence is greedy and has no {names}."


def outside(field: str, value: object, allowed: str) -> str:
    return f"`{field}` is {value}, but must be {allowed}."


def no_mapping(value: object) -> str:
    return outside("--dllm-algorithm-config", value, "a file with a mapping")


# By the name of a case: what is asked, and what is said to it; None where nothing is refused.
REQUESTS = {
    "a greedy request": ({}, None),
    "a temperature, of the likeliest token only": ({"sampling_params": {"temperature": 0.7, "top_k": 1}}, None),
    "a temperature": ({"sampling_params": {"temperature": 0.7}}, greedy("temperature above 0")),
    "no temperature, which is 1": ({"sampling_params": {"temperature": None}}, greedy("temperature above 0")),
    "a frequency penalty": ({"sampling_params": {"frequency_penalty": 0.5}}, greedy("frequency_penalty")),
    "a negative frequency penalty": ({"sampling_params": {"frequency_penalty": -0.5}}, greedy("frequency_penalty")),
    "a presence penalty": ({"sampling_params": {"presence_penalty": 0.5}}, greedy("presence_penalty")),
    "a repetition penalty": ({"sampling_params": {"repetition_penalty": 1.1}}, greedy("repetition_penalty")),
    "a least number of tokens": ({"sampling_params": {"min_new_tokens": 2}}, greedy("min_new_tokens")),
    "a bias": ({"sampling_params": {"logit_bias": {"3": 1.0}}}, greedy("logit_bias")),
    "a JSON schema": ({"sampling_params": {"json_schema": "{}"}}, greedy("json_schema")),
    "a regular expression": ({"sampling_params": {"regex": "a"}}, greedy("regex")),
    "a grammar": ({"sampling_params": {"ebnf": 'root ::= "a"'}}, greedy("ebnf")),
    "a structural tag": ({"sampling_params": {"structural_tag": "{}"}}, greedy("structural_tag")),
    "log-probabilities": ({"return_logprob": True}, greedy("return_logprob")),
    "a mask of sampling": ({"return_sampling_mask": True}, greedy("return_sampling_mask")),
    "hidden states": ({"return_hidden_states": True}, greedy("return_hidden_states")),
    "the chosen experts": ({"return_routed_experts": True}, greedy("return_routed_experts")),
    "a processor of logits": ({"custom_logit_processor": "{}"}, greedy("custom_logit_processor")),
    "embeddings": ({"input_embeds": [[0.1] * 32] * 3}, greedy("input_embeds")),
    "two things at once": (
        {"sampling_params": {"temperature": 0.7, "regex": "a"}, "return_logprob": True},
        greedy("temperature above 0, return_logprob, regex"),
    ),
    "an id above the vocabulary": ({"input_ids": [1, VOCAB]}, "`input_ids` has 160, but must be in [0, 160)."),
    "a negative id": ({"input_ids": [-1, 1]}, "`input_ids` has -1, but must be in [0, 160)."),
}
# These SGLang's front refuses itself, unless it is started with more than the tests start it with.
REFUSED_BY_SGLANG = {"a least number of tokens", "a processor of logits", "hidden states"}

NUMBER, INTEGER = "a number in [0, 1]", "an integer of at least 1"
SERVERS = {
    "a Clover of attention, with a radix cache asked for": ({}, None),
    "Gated DeltaNet without a radix cache": ({"model": "hybrid", "arguments": ["--disable-radix-cache"]}, None),
    "Gated DeltaNet with a radix cache": (
        {"model": "hybrid"},
        "A Clover with Gated DeltaNet layers needs `--disable-radix-cache`.",
    ),
    "pipeline parallelism": ({"arguments": ["--pp-size", "2"]}, "`--pp-size` must be 1 for a Clover."),
    "another algorithm": (
        {"arguments": ["--dllm-algorithm", "LowConfidence"]},
        "`--dllm-algorithm` is 'LowConfidence', but must be 'CloverLowConfidence' for CloverForDiffusionLM.",
    ),
    "no mask token": (
        {"arguments": ["--json-model-override-args", '{"mask_token_id": null}']},
        "`mask_token_id` is null: set it, `--json-model-override-args '{\"mask_token_id\": N}'`.",
    ),
    "a mask token above the vocabulary": (
        {"arguments": ["--json-model-override-args", '{"mask_token_id": 160}']},
        outside("mask_token_id", 160, "in [0, 160)"),
    ),
    "a negative mask token": (
        {"arguments": ["--json-model-override-args", '{"mask_token_id": -1}']},
        outside("mask_token_id", -1, "in [0, 160)"),
    ),
    "a block size of 0 in the config": (
        {"arguments": ["--json-model-override-args", '{"block_size": 0}']},
        outside("block_size", 0, INTEGER),
    ),
    "both settings": ({"settings": "threshold: 0.5\nblock_size: 16"}, None),
    "a threshold of 0": ({"settings": "threshold: 0"}, None),
    "a threshold of 1": ({"settings": "threshold: 1"}, None),
    "an empty file of settings": ({"settings": ""}, None),
    "an unknown setting": (
        {"settings": "thresh: 0.5"},
        "`thresh` is no field of CloverLowConfidence: there are threshold and block_size.",
    ),
    "a setting named by a number": (
        {"settings": "threshold: 0.5\n3: 4"},
        "`3` is no field of CloverLowConfidence: there are threshold and block_size.",
    ),
    "a threshold above 1": ({"settings": "threshold: 2"}, outside("threshold", 2, NUMBER)),
    "a threshold below 0": ({"settings": "threshold: -0.1"}, outside("threshold", -0.1, NUMBER)),
    "a threshold that is text": ({"settings": "threshold: high"}, outside("threshold", "'high'", NUMBER)),
    "a threshold that is true": ({"settings": "threshold: true"}, outside("threshold", True, NUMBER)),
    "a threshold that is no number": ({"settings": "threshold: .nan"}, outside("threshold", "nan", NUMBER)),
    "a threshold of nothing": ({"settings": "threshold:"}, outside("threshold", None, "left out or have a value")),
    "a block size of 0": ({"settings": "block_size: 0"}, outside("block_size", 0, INTEGER)),
    "a block size below 0": ({"settings": "block_size: -8"}, outside("block_size", -8, INTEGER)),
    "a block size that is no integer": ({"settings": "block_size: 8.0"}, outside("block_size", 8.0, INTEGER)),
    "a block size that is text": ({"settings": "block_size: '8'"}, outside("block_size", "'8'", INTEGER)),
    "a block size that is true": ({"settings": "block_size: true"}, outside("block_size", True, INTEGER)),
    "settings in a list": ({"settings": "[threshold, 0.5]"}, no_mapping(["threshold", 0.5])),
    "an empty list of settings": ({"settings": "[]"}, no_mapping([])),
    "a number for settings": ({"settings": "0"}, no_mapping(0)),
    "a text for settings": ({"settings": "threshold"}, no_mapping("'threshold'")),
}


def lacking(name: str) -> tuple[dict, str]:
    return {"without": name}, f"The checkpoint lacks 1 of Clover's tensors, such as {name}."


def added(name: str) -> tuple[dict, str]:
    said = f"The checkpoint has {name}, which is no tensor of a Clover with this config.json."
    return {"shapes": {name: [32]}}, said


def reshaped(name: str, given: tuple[int, ...], allowed: tuple[int, ...]) -> tuple[dict, str]:
    return {"shapes": {name: given}}, f"{name} is {given}, but must be {allowed} with this config.json."


GDN, ATTENTION, EXPERTS = "model.layers.0.linear_attn", "model.layers.1.self_attn", "model.layers.1.mlp.experts"
CHECKPOINTS = {
    "the whole checkpoint": ({}, None),
    "one tensor per expert": ({"split": True}, None),
    "a multi-token predictor beside the model": ({"shapes": {"mtp.fc.weight": [32, 64]}}, None),
    "a vision model beside the model": ({"shapes": {"model.visual.blocks.0.norm1.weight": [32]}}, None),
    "no head": lacking("lm_head.weight"),
    "no mixing of a block": lacking(f"{GDN}.bd_softmax_history_bias"),
    "no weights of a block's right side": lacking(f"{GDN}.conv_right_weight"),
    "no keys beside queries and values": lacking(f"{ATTENTION}.k_proj.weight"),
    "no gates beside their other projection": lacking("model.layers.0.mlp.shared_expert.up_proj.weight"),
    "no decay beside its write gate": lacking(f"{GDN}.in_proj_a.weight"),
    "no experts": lacking(f"{EXPERTS}.down_proj"),
    "no experts of one layer, split": (
        {"split": True, "without": f"{EXPERTS}.down_proj"},
        f"The checkpoint lacks 4 of Clover's tensors, such as {EXPERTS}.0.down_proj.weight.",
    ),
    "a bias": added(f"{ATTENTION}.q_proj.bias"),
    "a further layer": added("model.layers.3.input_layernorm.weight"),
    "a tensor of nobody": added("model.layers.0.mystery.weight"),
    "a tensor outside the model": added("mystery.weight"),
    "more experts": reshaped(f"{EXPERTS}.down_proj", (8, 32, 16), (4, 32, 16)),
    "more heads of keys": reshaped(f"{ATTENTION}.k_proj.weight", (64, 32), (32, 32)),
    "more channels of the convolution": reshaped(f"{GDN}.conv_right_weight", (128, 3), (64, 3)),
    "more tokens": reshaped("lm_head.weight", (320, 32), (160, 32)),
    "an expert coreset": (
        {"config": {"expert_coreset_top_p": 0.5}},
        "`expert_coreset_top_p` is set, but SGLang's experts are routed exactly here.",
    ),
}
CASES = {"requests": REQUESTS, "servers": SERVERS, "checkpoints": CHECKPOINTS}


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, dict[str, str | None]]:
    """What SGLang and the plugin say to each case, in one process for all: importing SGLang takes most of the time."""
    folder = tmp_path_factory.mktemp("refusals")
    asked = {kind: {name: case for name, (case, _) in cases.items()} for kind, cases in CASES.items()}
    asked["models"] = {kind: str(write_tiny_clover(folder / kind, kind)) for kind in KINDS}
    (folder / "cases.json").write_text(json.dumps(asked))
    run_with_sglang(folder, "refuse", folder / "cases.json", folder / "said.json")
    return json.loads((folder / "said.json").read_text())


@WITH_SGLANG
@pytest.mark.parametrize("kind, name", [(kind, name) for kind, cases in CASES.items() for name in cases])
def test_what_a_clover_cannot_do_is_refused_by_name_and_nothing_else(kind, name, said):
    assert said[kind][name] == CASES[kind][name][1]


# ---- the server ------------------------------------------------------------------------------------------------------


def post(url: str, path: str, body: dict) -> tuple[int, dict | str]:
    """The status and the body of an answer."""
    request = Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=600) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        return error.code, json.loads(error.read())


def check_refusals(url: str) -> None:
    for name, (case, reason) in REQUESTS.items():
        if name in REFUSED_BY_SGLANG:
            continue
        body = case if "input_embeds" in case else {"input_ids": [1, 2, 3]} | case
        body = body | {"sampling_params": {"temperature": 0, "max_new_tokens": 4} | case.get("sampling_params", {})}
        status, answer = post(url, "/generate", body)
        assert status == (400 if reason else 200), (name, answer)
        assert reason is None or answer["error"]["message"] == reason, name
    _, session = post(url, "/open_session", {"capacity_of_str_len": 1000})
    body = {"input_ids": [1, 2], "sampling_params": {"temperature": 0}, "session_params": {"id": session}}
    assert post(url, "/generate", body) == (400, {"error": {"message": greedy("session_params")}})


@WITH_SGLANG
def test_a_server_takes_the_steps_of_our_loop_over_http_and_refuses_with_the_reason(tmp_path):
    model, steps, prompts = (tmp_path / name for name in ("model", "steps.jsonl", "prompts.jsonl"))
    write_tiny_clover(model, "attention")
    prompts.write_text("".join(json.dumps(request) + "\n" for request in requests()))
    options = {"paths": paths(tmp_path), "environment": VARIABLES | {"CLOVER_STEPS": str(steps)}}
    options |= {"algorithm": "CloverLowConfidence", "arguments": ["--disable-radix-cache"]}
    nothing = {"algorithm": None, "threshold": None, "block_size": None, "mask_token_id": None}
    with sglang_server(model, tmp_path, threshold=0.6, block_size=BLOCK, **options) as url:
        check_refusals(url)
        logs = [
            record(Server(url), prompts, model, tmp_path / name, nothing, stream=stream, steps=steps)
            for name, stream in (("whole", False), ("streamed", True))
        ]
    assert logs[0].requests == logs[1].requests
    for log in logs:
        assert log.header.algorithm == {"name": "CloverLowConfidence", "threshold": 0.6, "block_size": BLOCK}
        assert log.header.model["mask_token_id"] == MASK
        check_equal(replay(log, open_model(model, BLOCK)), log)
