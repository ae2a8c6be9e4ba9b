"""The examples, run as a reader runs them."""

import importlib.util
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "checkpoints" / "clover-tiny"
TURNS = ("Convert 12 kg to g.", "What is 482 + 377?", "Sort these names in alphabetical order: Tom, Eva, Ida.")


@pytest.fixture(scope="module")
def loaded():
    model = AutoModel.from_pretrained(CHECKPOINT, trust_remote_code=True, dtype="auto")
    return model, AutoTokenizer.from_pretrained(CHECKPOINT, trust_remote_code=True)


@pytest.fixture(scope="module")
def chat():
    spec = importlib.util.spec_from_file_location("chat_example", ROOT / "examples" / "chat.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answers(model, tokenizer, turns) -> list[str]:
    """What generate() says turn by turn, each time from the start of the conversation."""
    messages, found = [], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(**inputs, max_new_tokens=256)[0, inputs["input_ids"].shape[1] :]
        found.append(tokenizer.decode(ids, skip_special_tokens=True))
        messages.append({"role": "assistant", "content": found[-1]})
    return found


def run(*arguments: str, stdin: str, **options) -> str:
    command = [sys.executable, str(ROOT / "examples" / "chat.py"), *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=ROOT, check=True, **options)
    return done.stdout


def test_a_chat_prints_the_answers_of_a_conversation_until_its_input_ends(loaded):
    first, second, third = answers(*loaded, TURNS)
    (alone,) = answers(*loaded, TURNS[2:])
    printed = run(stdin="\n".join([*TURNS, "/reset", TURNS[2], "/quit", "never asked"]))
    blocks = [block.split("\n  [")[0] for block in printed.split(", stop]\n\n")]
    assert blocks == [first, second, third, alone, ""]
    assert "\033" not in printed  # no drafts into a pipe


def test_a_turn_goes_on_from_the_cache_of_the_one_before_it(loaded, chat):
    model, tokenizer = loaded
    messages, caches, columns = [], None, []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: columns.append(args[0].shape[1]) if kwargs.get("use_cache") else None,
        with_kwargs=True,
    )
    for turn, expected in zip(TURNS, answers(model, tokenizer, TURNS), strict=True):
        columns.clear()
        messages.append({"role": "user", "content": turn})
        text, caches, out = chat.answer(
            model, tokenizer, chat.prompt_of(tokenizer, messages), caches, max_new_tokens=256
        )
        assert text == expected
        messages.append({"role": "assistant", "content": text})
    hook.remove()
    assert sum(columns) < out.sequences.shape[1] / 2  # of the last turn: what the cache holds was not run again


def test_a_cache_of_other_tokens_is_not_used(loaded, chat):
    model, tokenizer = loaded
    longer = [{"role": "user", "content": TURNS[2] + " " + TURNS[1]}]
    _, caches, _ = chat.answer(model, tokenizer, chat.prompt_of(tokenizer, longer), None)
    prompt = chat.prompt_of(tokenizer, [{"role": "user", "content": TURNS[0]}])
    assert chat.fitting(caches, prompt["input_ids"]) is None
    assert chat.answer(model, tokenizer, prompt, caches)[0] == answers(model, tokenizer, TURNS[:1])[0]
    assert torch.equal(prompt["input_ids"][0, :1], caches[0].ids[0, :1])


def test_on_a_terminal_drafts_are_shown_and_erased():
    leader, follower = pty.openpty()
    command = [sys.executable, str(ROOT / "examples" / "chat.py"), "--threshold", "1.0"]
    stdin = "\n".join(TURNS[:1]).encode()
    done = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=follower, stderr=subprocess.DEVNULL, cwd=ROOT)
    done.stdin.write(stdin)
    done.stdin.close()
    os.close(follower)
    printed = b""
    while True:
        try:
            piece = os.read(leader, 4096)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        printed += piece
    assert done.wait() == 0
    assert printed.count(b"\0337") == printed.count(b"\0338\033[K") > 5
    assert "·".encode() in printed
    assert b"12 kg = 12000 g" in re.sub(rb"\0337.*?\0338\033\[K", b"", printed, flags=re.DOTALL)


@pytest.mark.parametrize("columns", [5, 12, 30, 200])
def test_a_draft_stays_on_its_line_and_shows_the_word_that_is_not_whole_yet(loaded, chat, columns, monkeypatch, capsys):
    model, tokenizer = loaded
    monkeypatch.setenv("COLUMNS", str(columns))
    streamer = chat.DraftStreamer(tokenizer, model.config.mask_token_id, drafts=True)
    prompt = chat.prompt_of(tokenizer, [{"role": "user", "content": TURNS[1]}])
    chat.answer(model, tokenizer, prompt, None, streamer=streamer, threshold=1.0)
    printed = capsys.readouterr().out
    settled, longest = "", 0
    for piece in re.split("(\0337.*?\0338\033\\[K)", printed, flags=re.DOTALL):
        if piece.startswith("\0337"):
            draft = re.sub("\033(7|8|\\[2m|\\[0m|\\[K)", "", piece)
            column = len(settled.rsplit("\n", 1)[-1])
            column = column if column <= columns else (column - 1) % columns + 1
            assert "\n" not in draft
            assert column + len(draft) <= max(columns - 1, column)
            longest = max(longest, len(draft))
        else:
            settled += piece
    assert settled.strip() == answers(model, tokenizer, TURNS[1:2])[0].strip()
    assert longest >= min(columns - 1, 10)


def test_wide_and_combining_characters_are_counted_as_terminals_do(chat):
    assert chat.cut("日本語", 5) == "日本"
    assert chat.cut("e\u0301e\u0301", 1) == "e\u0301"
    assert chat.cut("abc", 0) == ""


def test_a_conversation_that_fills_the_context_says_so_and_goes_on(loaded):
    """A prompt that leaves room for less than --max-new-tokens is answered in that room."""
    _, tokenizer = loaded
    tokens = len(tokenizer(TURNS[0] + " ")["input_ids"])
    nearly, full = (" ".join(TURNS[:1] * (room // tokens)) for room in (900, 1100))
    printed = run(stdin="\n".join([full, nearly, "/reset", TURNS[0]]))
    said, tight, last, rest = printed.split("]\n\n")
    assert said == "  [the conversation has filled the context: /reset begins a new one"
    assert "tokens per forward" in tight
    assert last.startswith("12 kg = 12000 g\n  [")
    assert rest == ""


def test_a_conversation_with_thinking_goes_on_from_its_cache(loaded, chat):
    model, tokenizer = loaded
    messages = [{"role": "user", "content": "What is 482 + 377?"}]
    text, caches, _ = chat.answer(model, tokenizer, chat.prompt_of(tokenizer, messages), None)
    assert "<think>" in text
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": TURNS[0]}]
    prompt = chat.prompt_of(tokenizer, messages)
    assert chat.fitting(caches, prompt["input_ids"]) is caches
    assert chat.answer(model, tokenizer, prompt, caches)[0] == chat.answer(model, tokenizer, prompt, None)[0]
