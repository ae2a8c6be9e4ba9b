"""SGLang 0.5.23 serves a Clover through `parity/sglang_plugin`, and its steps are those of this repository's loop.

The committed logs are of SGLang's engine on a CPU; they are replayed here without SGLang. Where CLOVER_SGLANG_PYTHON
names a python that has SGLang, the engine itself is run too (minutes). One checkpoint has attention only. The other has
Gated DeltaNet layers: scheduler, memory and backend are SGLang's, but its GDN kernels are for GPUs, and on a CPU those
of `site_cpu` stand in for them.
"""

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import torch_chunk_gated_delta_rule

from clover.parity.fingerprint import fingerprint
from clover.parity.log import Log, read_log
from clover.parity.models import open_model
from clover.parity.replay import Report, replay
from clover.parity.sglang_raw import convert
from clover.parity.tiny_clover import BLOCK, KINDS, MASK, write_tiny_clover

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


# ---- the engine itself -----------------------------------------------------------------------------------------------


def environment(folder: Path) -> dict[str, str]:
    """What makes SGLang find `clover`, the plugin, the observer of steps and, on a CPU, the stand-ins."""
    (folder / "clover").symlink_to(ROOT, target_is_directory=True)
    observer = folder / "clover_sglang_observer-0.1.0.dist-info"  # as `pip install parity/sglang_observer` would write
    observer.mkdir()
    (observer / "METADATA").write_text("Metadata-Version: 2.1\nName: clover-sglang-observer\nVersion: 0.1.0\n")
    (observer / "entry_points.txt").write_text("[sglang.srt.plugins]\nobserver = clover_sglang_observer:activate\n")
    paths = [folder, PLUGIN / "site", PLUGIN / "site_cpu", ROOT / "parity" / "sglang_observer"]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "clover.parity.sglang_plugin",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_MAMBA_CONV_DTYPE": "float32",  # of the convolution's states, which are bf16 by default
        "OMP_NUM_THREADS": "1",
    }


@WITH_SGLANG
@pytest.mark.parametrize("layers, mode", [("attention", "fdfo"), ("attention", "sync"), ("hybrid", "fdfo")])
def test_sglangs_engine_takes_the_steps_of_our_loop(layers, mode, tmp_path):
    model, out = write_tiny_clover(tmp_path / "model", layers), tmp_path / "raw.json"
    script = ROOT / "tests" / "run_sglang_engine.py"
    done = subprocess.run(
        [SGLANG, script, model, out, mode, "0.6"], env=environment(tmp_path), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    recording = json.loads(out.read_text())
    assert "greedy" in recording["refused"]
    assert recording["steps_at_the_mask_token_are_ours"]
    log = convert(recording, model)
    check_equal(replay(log, open_model(model, BLOCK)), log)
