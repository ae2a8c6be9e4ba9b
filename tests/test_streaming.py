"""Streamers get the answer in order as it settles: joined, it is the answer; drafts show the block in progress."""

import asyncio
import re
from pathlib import Path
from threading import Thread

import pytest
import torch
import transformers
from small_clover import MASK, left_padded, prompt, small_clover
from transformers import AsyncTextIteratorStreamer, AutoModel, AutoTokenizer, TextIteratorStreamer, TextStreamer
from transformers.generation import BaseStreamer

CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "clover-tiny"
TABLE = "Make a CSV table (name,age,points): James is 62 and has 82 points; David is 61 and has 12 points."


class Recorder(BaseStreamer):
    """Keeps what it is given, in order."""

    def __init__(self):
        self.events = []

    def put(self, value):
        self.events.append(("put", value.tolist()))

    def end(self):
        self.events.append(("end", None))


class DraftRecorder(Recorder):
    def put_draft(self, value):
        self.events.append(("draft", value.tolist()))


@pytest.fixture
def model():
    return small_clover()


@pytest.fixture(scope="module")
def tiny():
    return AutoModel.from_pretrained(CHECKPOINT, trust_remote_code=True, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT, trust_remote_code=True)


@pytest.fixture
def inputs(tokenizer):
    messages = [{"role": "user", "content": TABLE}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def write(model, text, **options):
    return model.generate(**left_padded([text]), **{"max_new_tokens": 30, "threshold": 0.4} | options)


def answer_text(tokenizer, model, inputs, threshold=None, **options) -> str:
    ids = model.generate(**inputs, max_new_tokens=40, threshold=threshold)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(ids, **options)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 20])
@pytest.mark.parametrize("threshold", [0.0, 0.4, 1.0])
def test_a_streamer_gets_the_prompt_then_the_answer_in_order_then_the_end(model, length, threshold):
    streamer, text = Recorder(), prompt(length)
    out = write(model, text, streamer=streamer, threshold=threshold)[0].tolist()
    (first, given), *puts, last = streamer.events
    assert (first, given) == ("put", [text])
    assert last == ("end", None)
    assert {name for name, _ in puts} == {"put"}
    assert [token for _, tokens in puts for token in tokens] == out[length:]
    assert threshold == 0.0 or len(puts) > 4


def test_tokens_are_streamed_as_soon_as_nothing_before_them_is_masked(model):
    streamer, steps = Recorder(), []
    write(model, prompt(5), streamer=streamer, callback=lambda row, step, block: steps.append(step))
    streamed = [tokens for name, tokens in streamer.events[1:-1]]
    assert streamed == [step.settled for step in steps if step.settled]
    assert sum(not step.settled for step in steps) > 0


def test_drafts_show_what_is_not_settled_of_the_block(model):
    streamer, text = DraftRecorder(), prompt(5)
    out = write(model, text, streamer=streamer)[0, 5:].tolist()
    settled, drafts = 0, 0
    for name, value in streamer.events[1:-1]:
        if name == "put":
            settled += len(value)
        else:
            drafts += 1
            assert value[0] == MASK
            assert (5 + settled + len(value)) % 8 == 0
            later = out[settled : settled + len(value)]
            assert all(token in (MASK, final) for token, final in zip(value, later, strict=False))
    assert drafts > 4


def test_text_is_printed_as_the_answer(tiny, tokenizer, inputs, capsys):
    tiny.generate(**inputs, max_new_tokens=40, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.rstrip("\n") == answer_text(tokenizer, tiny, inputs)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_iterated_text_joins_to_the_answer(tiny, tokenizer, inputs, skip_special_tokens):
    options = {"skip_special_tokens": skip_special_tokens}
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60, **options)
    thread = Thread(target=tiny.generate, kwargs={**inputs, "max_new_tokens": 40, "streamer": streamer})
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == answer_text(tokenizer, tiny, inputs, **options)
    assert "<|mask|>" not in "".join(pieces)


def test_text_can_be_awaited(tiny, tokenizer, inputs):
    async def read():
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        thread = Thread(target=tiny.generate, kwargs={**inputs, "max_new_tokens": 40, "streamer": streamer})
        thread.start()
        pieces = [piece async for piece in streamer]
        thread.join()
        return "".join(pieces)

    assert asyncio.run(read()) == answer_text(tokenizer, tiny, inputs)


def test_a_character_of_several_tokens_is_streamed_whole(model, tokenizer):
    """The answer is forced: emoji, of which this tokenizer makes a token a byte."""
    ids = tokenizer("🌱 ünï 🌻 ok", add_special_tokens=False)["input_ids"]
    tiny = AutoModel.from_pretrained(CHECKPOINT, trust_remote_code=True, dtype=torch.float32)
    start = 5

    def force(before, scores):
        wanted = ids[before.shape[1] - start] if before.shape[1] - start < len(ids) else tokenizer.eos_token_id
        return torch.full_like(scores, -30.0).index_fill(-1, torch.tensor([wanted]), 0.0)

    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60, skip_special_tokens=True)
    tiny.generate(torch.full((1, start), 7), streamer=streamer, logits_processor=[force], max_new_tokens=60)
    pieces = list(streamer)
    assert "".join(pieces) == "🌱 ünï 🌻 ok"
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_exception_in_a_streamer_leaves_the_model_usable(model):
    class Broken(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.events) == 4:
                raise RuntimeError("the reader hung up")

    before = write(model, prompt(5))
    with pytest.raises(RuntimeError, match="hung up"):
        write(model, prompt(5), streamer=Broken())
    assert torch.equal(write(model, prompt(5)), before)


def test_who_waits_for_the_text_is_let_go_when_something_fails(model):
    """Whoever iterates over a TextIteratorStreamer in another thread would wait for ever."""

    def fails(row, step, block):
        raise RuntimeError("the user's")

    ended = Recorder()
    with pytest.raises(RuntimeError, match="the user's"):
        write(model, prompt(5), streamer=ended, callback=fails)
    assert ended.events[-1][0] == "end"


def test_a_streamer_for_several_answers_is_refused(model):
    with pytest.raises(ValueError, match="`streamer`.*2 answers"):
        model.generate(**left_padded([prompt(5), prompt(6)]), max_new_tokens=4, streamer=Recorder())
    with pytest.raises(ValueError, match="`streamer`.*2 answers"):
        write(model, prompt(5), streamer=Recorder(), do_sample=True, num_return_sequences=2)


def test_what_is_no_streamer_is_refused(model):
    with pytest.raises(ValueError, match="`streamer`.*put"):
        write(model, prompt(5), streamer=print)


@pytest.mark.skipif(not hasattr(transformers, "TextDiffusionStreamer"), reason="transformers 5.24 or newer has it")
def test_transformers_own_diffusion_streamer_shows_drafts_and_leaves_the_answer(tiny, tokenizer, inputs, capsys):
    streamer = transformers.TextDiffusionStreamer(tokenizer, skip_prompt=True)
    tiny.generate(**inputs, max_new_tokens=40, threshold=1.0, streamer=streamer)
    printed = capsys.readouterr().out
    assert "<|mask|>" in printed  # a draft, in yellow between a saved and a restored cursor
    final = re.sub(r"\0337.*?\0338\033\[J", "", printed, flags=re.DOTALL)
    assert final.rstrip("\n") == answer_text(tokenizer, tiny, inputs, threshold=1.0)
