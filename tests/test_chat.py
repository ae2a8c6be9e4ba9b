"""Chats: templates with tools and thinking, answers taken apart, thinking cut short, transformers' pipeline."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, TextIteratorStreamer, pipeline

from clover.training.tasks import TOOL_SCHEMAS

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "checkpoints" / "clover-tiny"
SUM = [{"role": "user", "content": "What is 482 + 377?"}]
SORT = [{"role": "user", "content": "Sort these names in alphabetical order: Tom, Eva, Ida."}]
ALARM = [{"role": "user", "content": "Wake me at 07:30 for tennis."}]


@pytest.fixture(scope="module")
def model():
    return AutoModel.from_pretrained(CHECKPOINT, trust_remote_code=True, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT, trust_remote_code=True)


def answer(model, tokenizer, messages, template: dict | None = None, **options) -> tuple[str, dict]:
    """The answer's text, and the same taken apart."""
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, **(template or {})
    )
    ids, width = model.generate(**inputs, max_new_tokens=100, **options)[0], inputs["input_ids"].shape[1]
    return tokenizer.decode(ids[width:]), tokenizer.parse_response(ids[width:], prefix=ids[:width])


def test_thinking_and_content_are_told_apart(model, tokenizer):
    text, message = answer(model, tokenizer, SUM)
    assert message == {"role": "assistant", "thinking": "2+7+0=09\n8+7+0=15\n4+3+1=08", "content": "859"}
    assert text == "<think>\n" + message["thinking"] + "\n</think>\n\n859<|im_end|>"


def test_tool_calls_are_found_with_their_arguments(model, tokenizer):
    tools = [TOOL_SCHEMAS["set_alarm"], TOOL_SCHEMAS["get_weather"]]
    _, message = answer(model, tokenizer, ALARM, {"tools": tools})
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "set_alarm", "arguments": {"time": "07:30", "label": "tennis"}}
    assert "content" not in message


def test_the_35b_tokenizers_template_takes_its_answers_apart(tokenizer):
    """Its calls are written as XML; the small model's tokenizer stands in for one whose vocabulary is not here."""
    template = json.loads((ROOT / "tokenizer_config.json").read_text())["response_template"]
    text = (
        "I should look.\n</think>\n\nOne moment.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n"
        "</parameter>\n</function>\n</tool_call><|im_end|>"
    )
    message = tokenizer.parse_response(text, template, prefix="<|im_start|>assistant\n<think>\n")
    assert message["thinking"].strip() == "I should look."
    assert message["content"].strip() == "One moment."
    assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "Oslo"}}


def test_without_thinking_the_answer_has_none(model, tokenizer):
    text, _ = answer(model, tokenizer, SORT, {"enable_thinking": False})
    assert text == "Eva, Ida, Tom<|im_end|>"
    text, _ = answer(model, tokenizer, SUM, {"enable_thinking": False})
    assert "<think>" not in text


@pytest.mark.parametrize("block_size", [4, 32])
@pytest.mark.parametrize("limit", [0, 1, 5, 9, 20])
@pytest.mark.parametrize("threshold", [0.5, 0.95, 1.0])
def test_thinking_is_closed_after_so_many_tokens(model, tokenizer, limit, threshold, block_size):
    options = {"threshold": threshold, "block_size": block_size}
    free, _ = answer(model, tokenizer, SUM, **options)
    text, _ = answer(model, tokenizer, SUM, max_thinking_tokens=limit, **options)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    start, end = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    assert ids[0] == start
    assert ids.count(end) == 1
    thought = ids.index(end) - 1
    assert thought >= limit
    # Tokens that were accepted before the mark that opens the thinking part stay.
    assert thought <= limit + block_size
    assert text != free


@pytest.mark.parametrize("block_size", [8, 32])
@pytest.mark.parametrize("above", [0, 1, 3, 10, 60])
def test_a_limit_that_thinking_does_not_reach_changes_nothing(model, tokenizer, above, block_size):
    """Thinking is cut short, never drawn out to the limit."""
    text, _ = answer(model, tokenizer, SUM, threshold=1.0, block_size=block_size)
    thought = tokenizer(text, add_special_tokens=False)["input_ids"].index(tokenizer.convert_tokens_to_ids("</think>"))
    limited = answer(
        model, tokenizer, SUM, threshold=1.0, block_size=block_size, max_thinking_tokens=thought - 1 + above
    )
    assert limited[0] == text
    assert answer(model, tokenizer, SORT, max_thinking_tokens=0) == answer(model, tokenizer, SORT)


@pytest.mark.parametrize("slope", [0.5, 1.0, 2.0, 10.0])
@pytest.mark.parametrize("start", [0, 3])
def test_nothing_behind_an_end_that_a_ramp_brought_is_accepted_with_it(model, tokenizer, start, slope):
    """It makes the end likely at every position of a block; what else was chosen there was chosen as if it went on.

    An end that the model writes in a later pass, when the ramp is off, is its own.
    """
    inputs = tokenizer.apply_chat_template(SUM, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    options = {"max_new_tokens": 100, "think_end_ramp": {"start": start, "slope": slope, "max": 100.0}}
    out = model.generate(**inputs, **options, return_dict_in_generate=True, output_trace=True)
    end = tokenizer.convert_tokens_to_ids("</think>")
    ends = [step for step in out.trace[0] if end in step.tokens]
    assert ends
    for step in ends:
        assert step.tokens.index(end) == len(step.tokens) - 1
        assert step.positions == sorted(step.positions)


PARTS = [{"type": "text", "text": "What is "}, {"type": "text", "text": "482 + 377?"}]


def test_a_message_in_text_parts_is_the_text(tokenizer):
    parts, text = ([{"role": "user", "content": content}] for content in (PARTS, "What is 482 + 377?"))
    assert tokenizer.apply_chat_template(parts, tokenize=False) == tokenizer.apply_chat_template(text, tokenize=False)


@pytest.mark.parametrize("content", [5, {"text": "x"}, [{"type": "image", "url": "x"}]])
def test_a_message_that_is_no_text_is_refused(tokenizer, content):
    with pytest.raises(Exception, match="text parts"):
        tokenizer.apply_chat_template([{"role": "user", "content": content}])


def test_a_limit_without_the_marks_of_thinking_is_refused(model, monkeypatch):
    monkeypatch.setattr(model.generation_config, "think_end_token_id", None)
    with pytest.raises(ValueError, match="`max_thinking_tokens` is 5.*think_end_token_id"):
        model.generate(torch.tensor([[5, 6]]), max_thinking_tokens=5)


@pytest.fixture(scope="module")
def pipe():
    return pipeline("text-generation", model=str(CHECKPOINT), trust_remote_code=True, dtype=torch.float32)


def test_a_pipeline_answers_chats(pipe, model, tokenizer):
    (result,) = pipe(SUM)
    assert result["generated_text"] == [*SUM, answer(model, tokenizer, SUM)[1]]


def test_a_pipeline_answers_batches_of_chats_as_single_ones(pipe):
    together = pipe([SUM, SORT, SUM], batch_size=3)
    assert together == [pipe(SUM), pipe(SORT), pipe(SUM)]


def test_options_reach_generate_through_a_pipeline(pipe):
    assert "content" not in pipe(SUM, max_new_tokens=4, threshold=0.5)[0]["generated_text"][-1]
    with pytest.raises(ValueError, match="threshold"):
        pipe(SUM, threshold=1.5)


def test_a_pipeline_streams(pipe, model, tokenizer):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    pipe(SUM, streamer=streamer)
    assert "".join(streamer) == answer(model, tokenizer, SUM)[0]


def test_a_pipeline_samples(pipe):
    torch.manual_seed(0)
    first = pipe(SORT, do_sample=True, temperature=5.0, max_new_tokens=20)
    torch.manual_seed(1)
    assert pipe(SORT, do_sample=True, temperature=5.0, max_new_tokens=20) != first


CONTROLS = {
    "presence_penalty": 60.0,
    "frequency_penalty": 10.0,
    "repetition_penalty": 20.0,
    "no_repeat_ngram_size": 2,
    "stop_ramp": {"start": 8, "slope": 10.0, "max": 90.0},
}


@pytest.mark.parametrize("name", CONTROLS)
def test_each_control_ends_a_forced_repetition(model, tokenizer, name):
    stuck = tokenizer("Ida", add_special_tokens=False)["input_ids"][0]

    def say_one_token(head, inputs, logits):
        return logits.index_copy(-1, torch.tensor([stuck]), logits.amax(-1, keepdim=True).abs() + 20)

    hook = model.lm_head.register_forward_hook(say_one_token)
    inputs = tokenizer.apply_chat_template(SORT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    width, options = inputs["input_ids"].shape[1], {"max_new_tokens": 64}
    repeating = model.generate(**inputs, **options)[0, width:].tolist()
    controlled = model.generate(**inputs, **options, **{name: CONTROLS[name]})[0, width:].tolist()
    hook.remove()
    assert repeating == [stuck] * 64
    assert controlled.count(stuck) < 40
