"""SGLang 0.5.23's own logs, step by step: Clover's loop over the same model writes the same.

`parity/logs` holds two recordings of genuine SGLang runs, first done first out with blocks of 4 and synchronous with
blocks of 8. The model is rebuilt from its seed (`tiny_sdar.py`) and driven by Clover's loop through its three verbs.
SGLang denoises the whole of an answer's last block and cuts it afterwards; Clover stops where nothing more would be
shown, so it takes a beginning of the steps logged there. SGLang's last step of each block only stores it.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clover.generation_clover import Ends, LowConfidence, block_diffusion
from clover.parity.log import Log, Step, read_log
from clover.parity.models import open_model
from clover.parity.tiny_sdar import MASK, write_tiny_sdar

FOLDER = Path(__file__).parents[1] / "parity" / "logs"
LOGS = {mode: read_log(FOLDER / f"sglang-0.5.23-sdar-{mode}.jsonl") for mode in ("fdfo", "sync")}
# torch's fp32 softmax on a CPU, with which SGLang recorded, loses up to 4e-4 over these 151,672 entries; Clover's
# logsumexp is within 2e-6 of fp64 (`test_confidences_are_exact_over_a_wide_vocabulary`).
SOFTMAX_NOISE = 1e-3

EACH_LOG = pytest.mark.parametrize("log", LOGS.values(), ids=LOGS)
REQUESTS = [(mode, i) for mode, log in LOGS.items() for i in range(len(log.requests))]
EACH_REQUEST = pytest.mark.parametrize(
    "log, index", [(LOGS[mode], i) for mode, i in REQUESTS], ids=[f"{mode}-{i}" for mode, i in REQUESTS]
)


@pytest.fixture(scope="module")
def sdar(tmp_path_factory):
    """The model, for blocks of any size."""
    return open_model(write_tiny_sdar(tmp_path_factory.mktemp("sdar")), block_size=0)


def sizes(log: Log) -> tuple[float, int]:
    return log.header.algorithm["threshold"], log.header.algorithm["block_size"]


def in_blocks(sdar, log: Log):
    return replace(sdar, block_size=log.header.algorithm["block_size"])


class Recording:
    """Chooses as LowConfidence does, and keeps every choice."""

    def __init__(self, log: Log):
        self.choose, self.choices = LowConfidence(sizes(log)[0], MASK), []
        self.mask_token_id = MASK

    def __call__(self, logits, masked, rows=None):
        self.choices.append(self.choose(logits, masked))
        return self.choices[-1]


def write(sdar, log: Log, indices: list[int], choose=None):
    """The answers of Clover's loop to requests of one budget, and per row the (start, block) after each step."""
    requests, blocks = [log.requests[i] for i in indices], [[] for _ in indices]
    threshold, size = sizes(log)
    sampling = requests[0].sampling
    answers = block_diffusion(
        in_blocks(sdar, log),
        [torch.tensor(request.prompt) for request in requests],
        choose or LowConfidence(threshold, MASK),
        block_size=size,
        ends=Ends(
            sampling["max_new_tokens"], () if sampling.get("ignore_eos") else tuple(log.header.model["eos_token_ids"])
        ),
        callback=lambda row, step, block: blocks[row].append((step.block * size, block)),
    )
    return answers, blocks


def same_up_to_the_last_block(ours: list, logged: list[Step]) -> bool:
    """Whether the logged steps that Clover did not take are all of the last block."""
    last = logged[-1].start
    return bool(ours) and all(step.start == last == ours[-1][0] for step in logged[len(ours) :])


def test_the_logs_hold_what_is_compared():
    """Both modes, nine requests each, and every way a step can go."""
    assert [(sizes(log), len(log.requests)) for log in LOGS.values()] == [((0.6, 4), 9), ((0.6, 8), 9)]
    for log in LOGS.values():
        assert log.header.model["mask_token_id"] == MASK
        filled = [[a != b for a, b in zip(s.before, s.after, strict=True)] for s in log.steps]
        sure = [[c is not None and c > 0.6 for c in s.confidences] for s in log.steps]
        assert any(sum(f) > 1 for f in filled), "a step that accepts several"
        assert any(sum(f) == 1 and not any(s) for f, s in zip(filled, sure, strict=True)), "a fallback"
        assert {len(r.prompt) % sizes(log)[1] == 0 for r in log.requests} == {True, False}


@EACH_REQUEST
def test_every_logged_request_is_answered_alike(sdar, log, index):
    (answer,), _ = write(sdar, log, [index])
    request = log.requests[index]
    assert answer.tokens == request.output
    assert answer.finish_reason == request.finish_reason


@EACH_REQUEST
def test_every_denoising_step_fills_what_sglang_filled_with_the_same_confidences(sdar, log, index):
    recording, logged = Recording(log), log.steps_of(index)
    (answer,), (blocks,) = write(sdar, log, [index], recording)
    assert same_up_to_the_last_block(blocks, logged)
    assert blocks == [(step.start, step.after) for step in logged[: len(blocks)]]
    for trace, choice, step in zip(answer.trace, recording.choices, logged, strict=False):
        hidden = [i for i, token in enumerate(step.before) if token == MASK]
        assert choice.confidences.isfinite()[0].nonzero().flatten().tolist() == hidden
        expected = [step.confidences[i] for i in hidden]
        assert choice.confidences[0, hidden].tolist() == pytest.approx(expected, abs=SOFTMAX_NOISE)
        assert choice.tokens[0, hidden].tolist() == [step.tokens[i] for i in hidden]
        filled = [i for i in hidden if step.after[i] != MASK]
        assert trace.positions == [step.start + i for i in filled]
        assert trace.tokens == [step.after[i] for i in filled]
        assert trace.confidences == pytest.approx([step.confidences[i] for i in filled], abs=SOFTMAX_NOISE)


@EACH_LOG
def test_requests_in_one_batch_are_answered_as_sglang_answered_them(sdar, log):
    """The last two were one batch in SGLang too; with them three more of the same budget, of other lengths."""
    indices = [7, 8, 1, 5, 6]
    answers, blocks = write(sdar, log, indices)
    for index, answer, ours in zip(indices, answers, blocks, strict=True):
        logged = log.steps_of(index)
        assert answer.tokens == log.requests[index].output
        assert same_up_to_the_last_block(ours, logged)
        assert ours == [(step.start, step.after) for step in logged[: len(ours)]]
        assert answer.num_denoising_passes == len(ours)


@EACH_LOG
def test_each_logged_step_is_one_low_confidence_step(sdar, log):
    """Taken alone, from the logged block: the steps after the answer's cut as well."""
    model, choose = in_blocks(sdar, log), LowConfidence(sizes(log)[0], MASK)
    for index, request in enumerate(log.requests):
        text = list(request.prompt)
        for step in log.steps_of(index):
            prefix = torch.tensor([text[: step.start]], dtype=torch.long)
            block = torch.tensor([step.before])
            masked = block == MASK
            logits = model.denoise(model.prefill(prefix, torch.ones_like(prefix)), block, masked)
            choice = choose(logits, masked)
            assert torch.where(choice.accepted, choice.tokens, block)[0].tolist() == step.after
            expected = torch.tensor([c for c in step.confidences if c is not None])
            torch.testing.assert_close(choice.confidences[masked], expected, rtol=0, atol=SOFTMAX_NOISE)
            if MASK not in step.after:
                text = text[: step.start] + step.after


@EACH_LOG
def test_every_block_but_the_last_is_committed_once(sdar, log):
    """SGLang stores a block in a pass of its own, the last block too; Clover commits what something follows."""
    for index, request in enumerate(log.requests):
        (answer,), (blocks,) = write(sdar, log, [index])
        prompt_blocks = len(request.prompt) // sizes(log)[1]
        stored = {commit.block for commit in log.commits if commit.request == index}
        assert answer.num_commit_passes == len({block for block in stored if block >= prompt_blocks}) - 1
        assert answer.num_denoising_passes == len(answer.trace) == len(blocks)
