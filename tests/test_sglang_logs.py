"""SGLang 0.5.23's own logs, step by step: Clover's loop over the same model writes the same.

`tests/data` holds two recordings of genuine SGLang runs, first done first out with blocks of 4 and synchronous with
blocks of 8. The model is rebuilt from its seed (`tiny_sdar.py`) and driven by Clover's loop through its three verbs.
SGLang denoises the whole of an answer's last block and cuts it afterwards; Clover stops where nothing more would be
shown, so it takes a beginning of the steps logged there. SGLang's last step of each block only stores it.
"""

import json
from pathlib import Path

import pytest
import torch
from tiny_sdar import MASK, UncachedSdar, tiny_sdar

from clover.generation_clover import Ends, LowConfidence, block_diffusion

DATA = Path(__file__).parent / "data"
LOGS = [json.loads(path.read_text()) for path in sorted(DATA.glob("sglang-*.json"))]
# torch's fp32 softmax on a CPU, with which SGLang recorded, loses up to 4e-4 over these 151,672 entries; Clover's
# logsumexp is within 2e-6 of fp64 (`test_confidences_are_exact_over_a_wide_vocabulary`).
SOFTMAX_NOISE = 1e-3

EACH_LOG = pytest.mark.parametrize("log", LOGS, ids=[log["mode"] for log in LOGS])
REQUESTS = [(log, i) for log in LOGS for i in range(len(log["requests"]))]
EACH_REQUEST = pytest.mark.parametrize("log, index", REQUESTS, ids=[f"{x['mode']}-{i}" for x, i in REQUESTS])


@pytest.fixture(scope="module")
def sdar():
    return tiny_sdar()


class Recording:
    """Chooses as LowConfidence does, and keeps every choice."""

    def __init__(self, log: dict):
        self.choose, self.choices = LowConfidence(log["threshold"], log["mask_id"]), []
        self.mask_token_id = log["mask_id"]

    def __call__(self, logits, masked, rows=None):
        self.choices.append(self.choose(logits, masked))
        return self.choices[-1]


def denoising_steps(log: dict, index: int) -> list[dict]:
    return [s for s in log["steps"] if s["request"] == index and log["mask_id"] in s["block_in"]]


def write(sdar, log: dict, indices: list[int], choose=None):
    """The answers of Clover's loop to requests of one budget, and per row the (start, block) after each step."""
    requests, blocks = [log["requests"][i] for i in indices], [[] for _ in indices]
    answers = block_diffusion(
        UncachedSdar(sdar, log["block_size"]),
        [torch.tensor(request["input_ids"]) for request in requests],
        choose or LowConfidence(log["threshold"], log["mask_id"]),
        block_size=log["block_size"],
        ends=Ends(requests[0]["max_new_tokens"], () if requests[0]["ignore_eos"] else (log["eos_token_id"],)),
        callback=lambda row, step, block: blocks[row].append((step.block * log["block_size"], block)),
    )
    return answers, blocks


def same_up_to_the_last_block(ours: list, logged: list[dict]) -> bool:
    """Whether the logged steps that Clover did not take are all of the last block."""
    last = logged[-1]["start"]
    return bool(ours) and all(step["start"] == last == ours[-1][0] for step in logged[len(ours) :])


def test_the_logs_hold_what_is_compared():
    """Both modes, nine requests each, and every way a step can go."""
    assert [(log["mode"], log["block_size"], len(log["requests"])) for log in LOGS] == [("fdfo", 4, 9), ("sync", 8, 9)]
    for log in LOGS:
        assert log["mask_id"] == MASK
        steps = [s for s in log["steps"] if MASK in s["block_in"]]
        filled = [[a != b for a, b in zip(s["block_in"], s["block_out"], strict=True)] for s in steps]
        sure = [
            [m == MASK and c > log["threshold"] for m, c in zip(s["block_in"], s["confidence"], strict=True)]
            for s in steps
        ]
        assert any(sum(f) > 1 for f in filled), "a step that accepts several"
        assert any(sum(f) == 1 and not any(s) for f, s in zip(filled, sure, strict=True)), "a fallback"
        assert {len(r["input_ids"]) % log["block_size"] == 0 for r in log["requests"]} == {True, False}


@EACH_REQUEST
def test_every_logged_request_is_answered_alike(sdar, log, index):
    (answer,), _ = write(sdar, log, [index])
    request = log["requests"][index]
    assert answer.tokens == request["output_ids"]
    assert answer.finish_reason == request["finish_reason"]


@EACH_REQUEST
def test_every_denoising_step_fills_what_sglang_filled_with_the_same_confidences(sdar, log, index):
    recording, logged = Recording(log), denoising_steps(log, index)
    (answer,), (blocks,) = write(sdar, log, [index], recording)
    assert same_up_to_the_last_block(blocks, logged)
    assert blocks == [(step["start"], step["block_out"]) for step in logged[: len(blocks)]]
    for trace, choice, step in zip(answer.trace, recording.choices, logged, strict=False):
        hidden = [i for i, token in enumerate(step["block_in"]) if token == log["mask_id"]]
        assert choice.confidences.isfinite()[0].nonzero().flatten().tolist() == hidden
        expected = [step["confidence"][i] for i in hidden]
        assert choice.confidences[0, hidden].tolist() == pytest.approx(expected, abs=SOFTMAX_NOISE)
        assert choice.tokens[0, hidden].tolist() == [step["argmax"][i] for i in hidden]
        filled = [i for i in hidden if step["block_out"][i] != log["mask_id"]]
        assert trace.positions == [step["start"] + i for i in filled]
        assert trace.tokens == [step["block_out"][i] for i in filled]
        assert trace.confidences == pytest.approx([step["confidence"][i] for i in filled], abs=SOFTMAX_NOISE)


@EACH_LOG
def test_requests_in_one_batch_are_answered_as_sglang_answered_them(sdar, log):
    """The last two were one batch in SGLang too; with them three more of the same budget, of other lengths."""
    indices = [7, 8, 1, 5, 6]
    answers, blocks = write(sdar, log, indices)
    for index, answer, ours in zip(indices, answers, blocks, strict=True):
        logged = denoising_steps(log, index)
        assert answer.tokens == log["requests"][index]["output_ids"]
        assert same_up_to_the_last_block(ours, logged)
        assert ours == [(step["start"], step["block_out"]) for step in logged[: len(ours)]]
        assert answer.num_denoising_passes == len(ours)


@EACH_LOG
def test_each_logged_step_is_one_low_confidence_step(sdar, log):
    """Taken alone, from the logged block: the steps after the answer's cut as well."""
    model, choose = UncachedSdar(sdar, log["block_size"]), LowConfidence(log["threshold"], log["mask_id"])
    for index, request in enumerate(log["requests"]):
        text, steps = list(request["input_ids"]), denoising_steps(log, index)
        for step in steps:
            prefix = torch.tensor([text[: step["start"]]], dtype=torch.long)
            block = torch.tensor([step["block_in"]])
            masked = block == log["mask_id"]
            logits = model.denoise(model.prefill(prefix, torch.ones_like(prefix)), block, masked)
            choice = choose(logits, masked)
            assert torch.where(choice.accepted, choice.tokens, block)[0].tolist() == step["block_out"]
            expected = torch.tensor(step["confidence"])[masked[0]]
            torch.testing.assert_close(choice.confidences[masked], expected, rtol=0, atol=SOFTMAX_NOISE)
            if log["mask_id"] not in step["block_out"]:
                text = text[: step["start"]] + step["block_out"]


@EACH_LOG
def test_every_block_but_the_last_is_committed_once(sdar, log):
    """SGLang stores a block in a pass of its own, the last block too; Clover commits what something follows."""
    for index, request in enumerate(log["requests"]):
        (answer,), (blocks,) = write(sdar, log, [index])
        prompt_blocks = len(request["input_ids"]) // log["block_size"]
        stored = {s["start"] // log["block_size"] for s in log["steps"] if s["request"] == index and s["done"]}
        assert answer.num_commit_passes == len({block for block in stored if block >= prompt_blocks}) - 1
        assert answer.num_denoising_passes == len(answer.trace) == len(blocks)
