"""Any options at all: generate() refuses them before any work, naming one of them, or keeps every promise it makes.

Fields are drawn freely, contradictions included: values that must be refused, values that are allowed one by one, and
what has to be equal (a row alone and in a batch, drafted and autoregressive text). 5,000 cases in all.
"""

import re
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from small_clover import MASK, PAD, VOCAB, left_padded, prompt, small_clover

from clover import CloverGenerationConfig

START, END = 11, 12  # the marks of a thinking part
ORDINARY = [token for token in range(1, MASK) if token not in (START, END)]
ARGUMENTS = ("logits_processor", "stopping_criteria")  # no fields of a config
BLOCK_SIZE = 8  # the model's
QUICK = {"derandomize": True, "database": None, "deadline": None}
pytestmark = pytest.mark.filterwarnings("ignore")


# ---- what is drawn ---------------------------------------------------------------------------------------------------


def bias(token: int, by: float):
    """A processor that makes a token likelier."""

    def process(ids, scores):
        scores[:, token] += by
        return scores

    return process


def holds(token: int):
    """A criterion: the text ends with a token."""
    return lambda ids, scores: ids[:, -1] == token


tokens = st.sampled_from(ORDINARY)
ids = st.lists(tokens, max_size=5)
ramp = st.builds(
    lambda start, slope, max: {"start": start, "slope": slope, "max": max},
    st.integers(0, 9),
    st.sampled_from([0, 0.5, 4]),
    st.sampled_from([0, 3.0, 30]),
)
penalty = st.sampled_from([-1.0, 0, 0.0, 0.7, 5.0])

ALLOWED = {
    "block_size": st.sampled_from([1, 2, 3, 8, 13, None]),
    "threshold": st.sampled_from([0, 0.0, 0.2, 0.4, 0.9, 1.0, 1, None]),
    "max_denoising_steps": st.sampled_from([1, 2, 5, None]),
    "eos_token_id": st.one_of(tokens, ids, ids, st.just(MASK)),
    "temperature": st.sampled_from([0, 0.0, 0.2, 1.0, 1, 3.0]),
    "top_k": st.sampled_from([0, 1, 4, 50, 10**6]),
    "top_p": st.sampled_from([0.01, 0.5, 0.95, 1.0, 1]),
    "min_p": st.sampled_from([0, 0.0, 0.05, 1.0, 1, None]),
    "num_return_sequences": st.sampled_from([1, 2, None]),
    "presence_penalty": penalty,
    "frequency_penalty": penalty,
    "repetition_penalty": st.sampled_from([0.5, 1, 1.0, 1.3, 20.0]),
    "stop_ramp": ramp,
    "think_end_ramp": ramp,
    "max_thinking_tokens": st.integers(0, 9),
    "no_repeat_ngram_size": st.integers(0, 4),
    "bad_words_ids": st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=4),
    "suppress_tokens": ids,
    "min_new_tokens": st.integers(0, 24),
    "stopping_criteria": st.lists(st.builds(holds, tokens), max_size=2),
    "logits_processor": st.lists(st.builds(bias, tokens, st.sampled_from([-9.0, 2.0, 40.0])), max_size=2),
    "return_dict_in_generate": st.booleans(),
    "expert_coreset_top_p": st.sampled_from([0.1, 0.6, 1.0, 1, None]),
    "use_cache": st.just(True),
    "num_beams": st.just(1),
}
DRAFTS = {"draft_threshold": st.sampled_from([0, 0.5, 1.0, None]), "draft_steps": st.sampled_from([1, 2, 5, None])}
ANYTHING = ALLOWED | DRAFTS | {"output_trace": st.booleans(), "do_sample": st.booleans()}

NO_NUMBER = ["x", "0.5", True, [1], {}, float("nan"), 1j]
NO_COUNT = [*NO_NUMBER, 1.5, -1]
NO_POSITIVE = [*NO_COUNT, 0]
NO_SHARE = [*NO_NUMBER, -0.1, 1.1, float("inf")]
NO_TOKEN = ["x", 2.5, True, [1], {}]
NO_TOKENS = ["x", 3, 2.5, True, [True], [1.5], ["x"], [-1], [[1]], {}]
NO_RAMP = [{"start": 1}, {"start": 1, "slope": "x", "max": 2}, {"start": 0, "slope": 1, "max": 1, "to": 2}, {}, 3, "x"]
REFUSED = {
    "decoding": ["x", "", 3, ["low_confidence"], "LOW_CONFIDENCE"],
    "block_size": NO_POSITIVE,
    "threshold": NO_SHARE,
    "max_new_tokens": NO_POSITIVE,
    "max_length": NO_POSITIVE,
    "max_denoising_steps": NO_POSITIVE,
    "eos_token_id": ["x", 2.5, True, [True], [3, "x"], {}, -1, [-1]],
    "pad_token_id": NO_TOKEN,
    "do_sample": ["x", 1, 0, [True]],
    "temperature": [*NO_NUMBER, -0.5, float("inf")],
    "top_k": NO_COUNT,
    "top_p": [*NO_SHARE, 0],
    "min_p": NO_SHARE,
    "num_return_sequences": NO_POSITIVE,
    "presence_penalty": [*NO_NUMBER, float("inf")],
    "frequency_penalty": [*NO_NUMBER, float("-inf")],
    "repetition_penalty": [*NO_NUMBER, 0, -1.0, float("inf")],
    "stop_ramp": NO_RAMP,
    "think_end_ramp": NO_RAMP,
    "think_start_token_id": NO_TOKEN,
    "think_end_token_id": NO_TOKEN,
    "max_thinking_tokens": NO_COUNT,
    "no_repeat_ngram_size": NO_COUNT,
    "bad_words_ids": ["x", 3, [1], [[]], [["x"]], [[1.5]], [[-1]], [[True]]],
    "suppress_tokens": NO_TOKENS,
    "min_new_tokens": NO_COUNT,
    "max_time": [*NO_NUMBER, 0, -1.0],
    "stop_strings": ["x", ["x"], [""], [3], 3],  # the good ones without a tokenizer
    "output_trace": ["x", 1, 0],
    "return_dict_in_generate": ["x", 1, 0],
    "expert_coreset_top_p": [*NO_SHARE, 0],
    "draft_threshold": NO_SHARE,
    "draft_steps": NO_POSITIVE,
}
REFUSED_ARGUMENTS = {
    "stopping_criteria": [3, [3], "x", holds(1)],
    "logits_processor": [3, [3], "x", bias(1, 2.0)],
    "treshold": [0.5],
    "blocksize": [8],
    "max_new_token": [5],
    "num_return_sequence": [2],
    "eos_token_ids": [3],
    "no_repeat_ngrams_size": [2],
    "draft_step": [1],
    "think_end_id": [END],
}


def _ramp(**changes):
    return {"start": 0, "slope": 1.0, "max": 2.0} | changes


THINKING = {"think_start_token_id": START, "think_end_token_id": END, "max_thinking_tokens": 3}
SENSELESS = [  # well typed, but there is nothing that block diffusion could do with it
    {"suppress_tokens": [VOCAB]},
    {"suppress_tokens": list(range(VOCAB))},
    {"bad_words_ids": [[3, VOCAB]]},
    {"bad_words_ids": [[VOCAB]]},
    {"eos_token_id": VOCAB},
    {"eos_token_id": [3, VOCAB]},
    {"pad_token_id": -1},
    THINKING | {"think_end_token_id": -1},
    THINKING | {"think_end_token_id": VOCAB},
    THINKING | {"think_end_token_id": MASK},
    THINKING | {"think_end_token_id": START},
    {"stop_ramp": _ramp(start=float("nan"))},
    {"stop_ramp": _ramp(slope=float("inf"))},
    {"stop_ramp": _ramp(max=float("nan"))},
    {"stop_ramp": _ramp(slope=-1)},
    {"stop_ramp": _ramp(max=-2.0)},
]


@dataclass
class Case:
    """A call of generate(): prompts, fields, and whether these come as a config; arguments always come as such."""

    prompts: list[list[int]]
    fields: dict
    as_config: bool

    def __call__(self, **changes):
        torch.manual_seed(0)
        fields = self.fields | changes
        arguments = {name: fields.pop(name) for name in list(fields) if name in ARGUMENTS}
        if self.as_config:
            arguments["generation_config"] = CloverGenerationConfig(**fields)
            fields = {}
        return small_clover().generate(**left_padded(self.prompts), **fields, **arguments)

    def alone(self, row: int) -> "Case":
        return Case([self.prompts[row]], self.fields, self.as_config)


@st.composite
def prompts(draw, most=3):
    """One to three, some of them with an open thinking part."""
    found = [prompt(draw(st.integers(1, 20)), seed) for seed in range(draw(st.integers(1, most)))]
    for text in found:
        mark = draw(st.sampled_from([None, None, START, END]))
        if mark is not None:
            text[draw(st.integers(0, len(text) - 1))] = mark
    return found


@st.composite
def calls(draw, decoding="low_confidence", names=tuple(ANYTHING), most=3):
    """Fields that are allowed one by one. Contradictions happen, but not in most cases."""
    chosen = draw(st.lists(st.sampled_from(names), unique=True, max_size=7))
    fields = {"max_new_tokens": draw(st.integers(1, 20)), "pad_token_id": PAD, "threshold": 0.4}
    fields |= {name: draw(ANYTHING[name]) for name in chosen}
    if decoding != "low_confidence":
        fields["decoding"] = decoding
        del fields["threshold"]
    if draw(st.booleans()) and {"temperature", "top_k", "top_p", "min_p", "num_return_sequences"} & set(fields):
        fields["do_sample"] = True
    if draw(st.integers(0, 9)):
        fields |= {"think_start_token_id": START, "think_end_token_id": END} if decoding == "low_confidence" else {}
    if fields.get("output_trace") and draw(st.booleans()):
        fields["return_dict_in_generate"] = True
    return Case(draw(prompts(most)), fields, draw(st.integers(0, 3)) == 0)


@st.composite
def wrong_calls(draw):
    """The same with one or two values that are not allowed, or names that there are not, whatever the decoding is."""
    case = draw(calls(decoding=draw(st.sampled_from(["low_confidence", "self_speculative", "autoregressive"])), most=1))
    kinds = REFUSED if case.as_config else REFUSED | REFUSED_ARGUMENTS
    for name in draw(st.lists(st.sampled_from(sorted(kinds)), unique=True, min_size=1, max_size=2)):
        case.fields[name] = draw(st.sampled_from(kinds[name]))
    return case


# ---- what has to hold ------------------------------------------------------------------------------------------------


@contextmanager
def passes():
    """A list that grows with every forward pass, but not without end."""
    seen = []

    def see(*args):
        seen.append(1)
        assert len(seen) < 2000, "an endless answer"

    hook = small_clover().model.register_forward_pre_hook(see)
    try:
        yield seen
    finally:
        hook.remove()


def refusal(case: Case) -> str | None:
    """What generate() says against a case; None if it answers it."""
    with passes() as seen:
        try:
            case()
        except ValueError as error:
            message = str(error)
        else:
            return None
    assert not seen, f"a pass was run before: {message}"
    assert any(re.search(rf"\b{name}\b", message) for name in case.fields), message
    return message


def in_order(word: list[int], text: list[int]) -> bool:
    return any(text[i : i + len(word)] == word for i in range(len(text)))


def check_answer(case: Case, text: list[int], answer: list[int], reason: str) -> None:
    """One answer by itself: its length, why it ends, and what it must not hold."""
    fields = case.fields
    eos = fields.get("eos_token_id") or []
    eos = eos if isinstance(eos, list) else [eos]
    criteria = fields.get("stopping_criteria") or []
    ended = [any(c(torch.tensor([text + answer[: i + 1]]), None) for c in criteria) for i in range(len(answer))]
    assert 1 <= len(answer) <= fields["max_new_tokens"]
    assert not any(token in eos for token in answer[:-1])
    assert not any(ended[:-1])
    if answer[-1] in eos:
        assert reason == "stop"
        assert len(answer) > (fields.get("min_new_tokens") or 0)
    elif ended[-1]:
        assert reason == "stopping_criteria"
    else:
        assert reason == "length"
        assert len(answer) == fields["max_new_tokens"]
    assert all(0 <= token < VOCAB for token in answer)
    assert not set(answer) & set(fields.get("suppress_tokens") or [])
    own = fields.get("decoding") is None
    for word in fields.get("bad_words_ids") or []:
        assert not in_order(word, answer)
    n = fields.get("no_repeat_ngram_size") or 0
    ngrams = [tuple(answer[i : i + n]) for i in range(len(answer) - n + 1)] if n else []
    assert len(set(ngrams)) == len(ngrams)
    if own:
        assert MASK not in answer
        check_thinking(text, answer, fields.get("max_thinking_tokens"), fields.get("block_size") or BLOCK_SIZE)


def check_thinking(text: list[int], answer: list[int], limit: int | None, block_size: int) -> None:
    """There is one part at most. If the prompt opens it, it is closed at the limit; if the answer opens it when other
    tokens of its block are known already, right after them."""
    if limit is None:
        return
    opened = [token for token in text if token in (START, END)][-1:] == [START]
    assert answer.count(START) + opened <= 1
    assert answer.count(END) <= 1
    marks = [token for token in text if token in (START, END)]
    open_for = 0 if marks[-1:] == [START] else None
    slack = 0
    for token in answer:
        if token in (START, END):
            open_for, slack = (0, block_size) if token == START else (None, 0)
        elif open_for is not None:
            open_for += 1
            assert open_for <= limit + slack


def check_trace(case: Case, text: list[int], answer: list[int], trace: list, reason: str) -> None:
    """The steps tell the whole answer, but for forced ends of thinking, and keep to the threshold."""
    fields, whole, filled = case.fields, text + answer, []
    threshold = 0.95 if fields["threshold"] is None else fields["threshold"]
    block_size, limit = fields.get("block_size") or BLOCK_SIZE, fields.get("max_denoising_steps")
    for step in trace:
        assert len(step.positions) == len(step.tokens) == len(step.confidences) > 0
        assert all(position // block_size == step.block for position in step.positions)
        assert all(0 <= confidence <= 1 for confidence in step.confidences)
        assert step.step < (limit or block_size)
        sure = all(confidence > threshold for confidence in step.confidences)
        assert sure or len(step.positions) == 1 or step.step + 1 == limit
        shown = zip(step.positions, step.tokens, strict=True)
        assert all(whole[position] == token for position, token in shown if position < len(whole))
        filled += step.positions
    assert len(set(filled)) == len(filled)
    assert min(filled, default=len(text)) >= len(text)
    rest = set(range(len(text), len(whole))) - set(filled)
    assert not rest or fields.get("max_thinking_tokens") is not None
    assert all(whole[position] == END for position in rest)
    settled = [token for step in trace for token in step.settled]
    assert answer[: len(settled)] == settled
    assert set(answer[len(settled) :]) <= {END}
    assert [step.finish_reason for step in trace] == [None] * (len(trace) - 1) + [
        reason if len(settled) == len(answer) else None
    ] * bool(trace)


def check(case: Case) -> None:
    """All that is promised of a case that is answered."""
    out = case(return_dict_in_generate=True)
    if not case.fields.get("return_dict_in_generate"):
        assert torch.equal(case(), out.sequences)
    texts = [text for text in case.prompts for _ in range(case.fields.get("num_return_sequences") or 1)]
    columns, own = max(map(len, texts)), case.fields.get("decoding") is None
    assert len(texts) == len(out.sequences)
    lengths = []
    for row, text in enumerate(texts):
        assert out.sequences[row, :columns].tolist() == [PAD] * (columns - len(text)) + text
        denoised, committed = out.num_denoising_passes[row], out.num_commit_passes[row]
        written = out.sequences[row, columns:].tolist()
        if denoised + committed:
            lengths.append(round(out.tokens_per_forward[row] * (denoised + committed)))
            assert out.tokens_per_forward[row] == lengths[-1] / (denoised + committed)
        else:  # all of it forced, without a pass
            lengths.append(next(i for i, token in enumerate([*written, PAD]) if token == PAD))
            assert set(written[: lengths[-1]]) == {END}
        answer, padding = written[: lengths[-1]], written[lengths[-1] :]
        assert set(padding) <= {PAD}
        check_answer(case, text, answer, out.finish_reason[row])
        if own:
            block_size = case.fields.get("block_size") or BLOCK_SIZE
            assert committed == (len(text) + len(answer) - 1) // block_size - len(text) // block_size
        else:
            assert out.mean_accepted_length[row] == len(answer) / committed
            assert denoised <= (case.fields.get("draft_steps") or 2) * committed
        if out.trace is not None:
            assert len(out.trace[row]) == (denoised if own else committed)
            if own:
                check_trace(case, text, answer, out.trace[row], out.finish_reason[row])
            else:
                assert [token for step in out.trace[row] for token in step.settled] == answer
    assert (out.trace is not None) == bool(case.fields.get("output_trace"))
    assert out.sequences.shape[1] == columns + max(lengths)


# ---- the tests -------------------------------------------------------------------------------------------------------


@settings(**QUICK, max_examples=3600)
@given(wrong_calls())
def test_what_is_not_allowed_is_refused_before_any_pass_by_a_name_that_was_given(case):
    assert refusal(case) is not None


@settings(**QUICK, max_examples=200)
@given(calls(), st.sampled_from(SENSELESS))
def test_what_makes_no_sense_for_a_model_is_refused_as_well(case, fields):
    case.fields |= fields
    assert refusal(case) is not None


ALL_FORCED = {"max_new_tokens": 1, "block_size": 1, "threshold": 0.4} | THINKING | {"max_thinking_tokens": 0}


@settings(**QUICK, max_examples=1000)
@given(calls())
@example(Case([[1, 2, START]], ALL_FORCED, False))  # written without a pass
def test_what_is_allowed_is_refused_for_a_contradiction_or_answered_with_every_promise_kept(case):
    if refusal(case) is None:
        check(case)


SHARED = ("eos_token_id", "min_new_tokens", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids")
SHARED += ("suppress_tokens", "stopping_criteria", "logits_processor")
SPECULATIVE = (*SHARED, *DRAFTS, "block_size", "expert_coreset_top_p", "output_trace")


@settings(**QUICK, max_examples=100)
@given(calls("self_speculative", SPECULATIVE, most=2))
def test_drafted_text_keeps_every_promise_and_is_the_autoregressive_one(case):
    assume(refusal(case) is None)
    check(case)
    together = case(return_dict_in_generate=True).sequences[:, max(map(len, case.prompts)) :].tolist()
    kept = {name: value for name, value in case.fields.items() if name in (*SHARED, "max_new_tokens", "pad_token_id")}
    for written, text in zip(together, case.prompts, strict=True):
        alone = Case([text], kept | {"decoding": "autoregressive"}, case.as_config)()[0, len(text) :].tolist()
        assert written == alone + [PAD] * (len(written) - len(alone))


@settings(**QUICK, max_examples=100)
@given(calls())
def test_each_greedy_row_and_the_first_drawn_one_is_what_it_is_alone(case):
    assume(len(case.prompts) > 1 and refusal(case) is None)
    copies, columns = case.fields.get("num_return_sequences") or 1, max(map(len, case.prompts))
    together = case(return_dict_in_generate=True)
    drawn = case.fields.get("do_sample") and case.fields.get("temperature") != 0
    for row, text in enumerate(case.prompts[:1] if drawn else case.prompts):
        alone = case.alone(row)(return_dict_in_generate=True)
        found = together.sequences[row * copies, columns:].tolist()
        written = alone.sequences[0, len(text) :].tolist()
        width = max(len(found), len(written))
        assert found + [PAD] * (width - len(found)) == written + [PAD] * (width - len(written))
        for name in ("finish_reason", "num_denoising_passes", "num_commit_passes", "tokens_per_forward"):
            assert getattr(together, name)[row * copies] == getattr(alone, name)[0]
