"""The generated corpus: right answers, separate splits, and an exact mask of what is to be learned."""

import csv
import json
import re
from datetime import datetime, timedelta
from fractions import Fraction
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from clover.training import tasks
from clover.training.corpus import (
    ANSWER_HEADER,
    EMPTY_THINKING,
    Document,
    Encoder,
    documents,
    encode,
    exchanges,
    heldout,
    messages_of,
    prompt_key,
    render,
    split_of,
    tools_of,
)
from clover.training.tasks import TASKS, Exchange, final_part, is_correct
from clover.training.tokenizer import VOCAB_SIZE, train

CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "clover-tiny"
TOKENIZER = AutoTokenizer.from_pretrained(CHECKPOINT)
DATE_FORMATS = {"ISO": "%Y-%m-%d", "British": "%d %B %Y", "American": "%B %d, %Y", "slash": "%d/%m/%Y"}
DATE = re.compile(r"\d{4}-\d\d-\d\d|\d+ [A-Z][a-z]+ \d{4}|[A-Z][a-z]+ \d+, \d{4}|\d\d/\d\d/\d{4}")
# Each unit in terms of the one its kind is measured in here.
UNIT_SIZES = {
    **{"km": 1000, "m": 1, "cm": Fraction(1, 100), "mm": Fraction(1, 1000)},
    **{"t": 10**6, "kg": 1000, "g": 1, "mg": Fraction(1, 1000)},
    **{
        "l": 1,
        "cl": Fraction(1, 100),
        "ml": Fraction(1, 1000),
        "kW": 1000,
        "W": 1,
        "h": 3600,
        "min": 60,
        "s": 1,
    },
}


def samples(task: str, count: int = 400) -> list[Exchange]:
    return list(islice(exchanges("train", 11, [task]), count))


def prompt_of(exchange: Exchange) -> str:
    return exchange.messages[0]["content"]


def numbers_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def first_documents(seed: int, count: int) -> list[Document]:
    return list(islice(documents(seed), count))


def read_date(text: str) -> tuple[datetime, str]:
    for form in DATE_FORMATS.values():
        try:
            return datetime.strptime(text, form), form
        except ValueError:
            continue
    raise ValueError(text)


def test_sorted_answers_order_the_items_of_the_request():
    for exchange in samples("sort"):
        prompt, answer = prompt_of(exchange), exchange.answer
        if numbers := numbers_in(prompt):
            descending = "descending" in prompt or "largest to" in prompt
            assert answer == ", ".join(map(str, sorted(numbers, reverse=descending)))
        else:
            words = [word for word in re.findall(r"\w+", prompt) if word in tasks.NAMES]
            assert answer == ", ".join(sorted(words))


def test_reformatted_dates_are_the_same_days_in_the_asked_form():
    found = [exchange for exchange in samples("date") if not exchange.answer.startswith("The day")]
    assert found
    for exchange in found:
        given_days = [read_date(text)[0] for text in DATE.findall(prompt_of(exchange))]
        answered = [read_date(text) for text in DATE.findall(exchange.answer)]
        asked = next(form for name, form in DATE_FORMATS.items() if f" {name} " in prompt_of(exchange))
        assert [day for day, _ in answered] == given_days
        assert {form for _, form in answered} == {asked}


def test_the_neighbouring_day_is_one_day_away_in_the_same_form():
    found = [exchange for exchange in samples("date") if exchange.answer.startswith("The day")]
    assert found
    for exchange in found:
        (asked,) = DATE.findall(prompt_of(exchange))
        repeated, answered = DATE.findall(exchange.answer)
        step = timedelta(1 if " after " in prompt_of(exchange) else -1)
        (day, form), (neighbour, same_form) = read_date(asked), read_date(answered)
        assert (repeated, neighbour, same_form) == (asked, day + step, form)


def test_both_sides_of_a_conversion_are_the_same_quantity():
    for exchange in samples("units"):
        asked = re.findall(r"([\d.]+) (\w+) to (\w+)", prompt_of(exchange))
        answered = re.findall(r"([\d.]+) (\w+) = ([\d.]+) (\w+)", exchange.answer)
        assert [(value, unit, other) for value, unit, _, other in answered] == asked
        for value, unit, result, other in answered:
            assert Fraction(value) * UNIT_SIZES[unit] == Fraction(result) * UNIT_SIZES[other]


def test_json_answers_hold_exactly_the_asked_facts():
    for exchange in samples("json"):
        prompt, facts = prompt_of(exchange), json.loads(exchange.answer)
        keys = re.search(r"(?:name|age|city|job)(?:, (?:name|age|city|job))+", prompt)[0].split(", ")
        words = set(re.findall(r"\w+", prompt))
        assert list(facts) == keys
        assert {str(value) for value in facts.values()} <= words
        known = {"name": tasks.NAMES, "age": range(18, 100), "city": tasks.CITIES, "job": tasks.JOBS}
        assert all(value in known[key] for key, value in facts.items())


def test_table_answers_are_csv_of_all_records_in_order():
    for exchange in samples("table"):
        header, *rows = csv.reader(exchange.answer.splitlines())
        assert ",".join(header) in prompt_of(exchange)
        kind = {"name": tasks.NAMES, "item": tasks.ITEMS, "city": tasks.CITIES}[header[0]]
        words = re.findall(r"\w+", prompt_of(exchange))
        expected = [word for word in words if word in kind or word.isdigit()]
        assert [field for row in rows for field in row] == expected
        assert all(len(row) == len(header) for row in rows)


def test_tool_calls_fit_an_offered_schema_with_arguments_from_the_request():
    for exchange in samples("tool"):
        body = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", exchange.answer)[1]
        call = json.loads(body)
        schema = {tool["function"]["name"]: tool["function"]["parameters"] for tool in exchange.tools}[call["name"]]
        assert list(call["arguments"]) == schema["required"] == list(schema["properties"])
        assert json.dumps(call) == body
        for key, value in call["arguments"].items():
            assert schema["properties"][key]["type"] == {int: "integer", str: "string"}[type(value)]
            assert str(value) in prompt_of(exchange)


def test_sums_are_right_in_every_column_and_in_the_result():
    for exchange in samples("add"):
        first, sign, second = re.search(r"(\d+) ([+-]) (\d+)", prompt_of(exchange)).groups()
        result = int(first) + int(second) if sign == "+" else int(first) - int(second)
        steps = exchange.answer.split("\n</think>")[0].removeprefix("<think>\n").split("\n")
        assert final_part(exchange.answer) == str(result)
        assert len(steps) == max(len(first), len(second))
        carry = 0
        for place, step in enumerate(steps):
            left, right, passed, value = (int(number) for number in re.split("[-+=]", step))
            a, b = int(first) // 10**place % 10, int(second) // 10**place % 10
            assert (left % 10, right, passed) == (a, b, carry)
            assert value == (left + right + passed if sign == "+" else left - right - passed)
            assert value % 10 == result // 10**place % 10
            carry = value // 10 if sign == "+" else left // 10


def word_problem_result(prompt: str) -> int:
    first, second, *rest = numbers_in(prompt)
    if "gives" in prompt:
        return first + second - rest[0]
    if "loses" in prompt:
        return first - second + rest[0]
    if "packs" in prompt:
        return first * second
    return first + (first + second)


def test_word_problems_are_right_in_every_step_and_in_the_result():
    for exchange in samples("word"):
        thought, result = re.fullmatch(r"<think>\n(.*)\n</think>\n\n(\d+) \w+", exchange.answer, re.S).groups()
        assert int(result) == word_problem_result(prompt_of(exchange)) > 0
        for step in thought.split("\n"):
            left, sign, right, value = re.fullmatch(r"(\d+)([-+*])(\d+)=(\d+)", step).groups()
            left, right = int(left), int(right)
            assert int(value) == {"+": left + right, "-": left - right, "*": left * right}[sign]


def test_only_the_result_counts_for_correctness():
    exchange = samples("add", 1)[0]
    assert is_correct(exchange, exchange.answer)
    assert is_correct(exchange, "<think>\nanything\n</think>\n" + final_part(exchange.answer) + "\n")
    assert not is_correct(exchange, exchange.answer + "0")
    assert not is_correct(exchange, "")


def test_the_spacing_of_a_tool_call_counts_for_correctness():
    exchange = samples("tool", 1)[0]
    assert is_correct(exchange, exchange.answer)
    assert not is_correct(exchange, exchange.answer.replace(": ", ":"))


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_hundreds_of_thousands_of_requests(task):
    # Birthday estimate: among n draws from N requests about n^2 / 2N repeat an earlier one. It is noisy, so the
    # bound leaves a tenth of slack. Training sees some 33,000 of each task.
    draws = 40_000
    found = {prompt_key(exchange) for exchange in samples(task, draws)}
    assert draws**2 / 2 / max(1, draws - len(found)) > 0.18e6


@pytest.mark.parametrize("task", TASKS)
def test_every_task_fits_into_128_tokens(task):
    assert max(len(ids) for ids, _ in Encoder(TOKENIZER)([Document((one,)) for one in samples(task)])) <= 128


def test_conversations_fit_into_256_tokens():
    assert max(len(ids) for ids, _ in Encoder(TOKENIZER)(first_documents(5, 4000))) <= 256


def test_equal_seeds_give_equal_conversations():
    assert first_documents(3, 200) == first_documents(3, 200)
    assert first_documents(3, 200) != first_documents(4, 200)
    assert heldout(80, seed=1) == heldout(80, seed=1)


def test_no_heldout_prompt_is_in_training():
    unseen = {prompt_key(exchange) for exchange in heldout(1000)}
    seen = {prompt_key(exchange) for document in first_documents(0, 20_000) for exchange in document.exchanges}
    assert len(unseen) == 1000
    assert not unseen & seen


def test_the_offered_tools_do_not_move_a_request_to_another_split():
    exchange = samples("tool", 1)[0]
    assert split_of(exchange) == split_of(Exchange(exchange.task, exchange.messages, None, exchange.answer))


def test_about_one_request_in_twenty_is_held_out():
    rng = Random(0)
    held = sum(split_of(tasks.add(rng)) == "heldout" for _ in range(10_000))
    assert 400 < held < 600


def test_heldout_exchanges_are_balanced_across_tasks():
    found = [exchange.task for exchange in heldout(80)]
    assert {task: found.count(task) for task in TASKS} == dict.fromkeys(TASKS, 10)


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split must be"):
        next(exchanges("test", 0))


def test_conversations_mix_turns_and_thinking_as_documented():
    found = first_documents(0, 4000)
    assert 0.13 < sum(len(document.exchanges) == 2 for document in found) / len(found) < 0.17
    assert 0.08 < sum(not document.thinking for document in found) / len(found) < 0.12


def test_render_equals_the_chat_template():
    for document in first_documents(1, 400):
        *past, last = messages_of(document)
        options = {} if document.thinking else {"enable_thinking": False}
        prompt = TOKENIZER.apply_chat_template(
            past, tools=tools_of(document) or None, add_generation_prompt=True, tokenize=False, **options
        )
        assert render(document) == prompt + last["content"] + "<|im_end|>\n"
        if document.thinking:
            whole = TOKENIZER.apply_chat_template([*past, last], tools=tools_of(document) or None, tokenize=False)
            assert render(document) == whole


def test_the_generation_prompt_is_a_token_prefix_of_the_conversation():
    for document in first_documents(2, 400):
        ids, mask = encode(TOKENIZER, document)
        prompt = TOKENIZER.apply_chat_template(
            messages_of(document)[:-1],
            tools=tools_of(document) or None,
            add_generation_prompt=True,
            return_dict=False,
            enable_thinking=document.thinking,
        )
        assert ids[: len(prompt)] == prompt
        assert mask[len(prompt) - 1 :] == [False] + [True] * (len(ids) - len(prompt) - 1) + [False]


def test_the_mask_covers_the_answers_and_their_end_marks():
    for document in first_documents(6, 400):
        ids, mask = encode(TOKENIZER, document)
        learned = TOKENIZER.decode([token for token, is_answer in zip(ids, mask, strict=True) if is_answer])
        answers = [message["content"] for message in messages_of(document) if message["role"] == "assistant"]
        kept = answers if document.thinking else answers[-1:]
        assert learned == "".join(answer + "<|im_end|>" for answer in kept)


def test_without_thinking_the_answer_follows_an_empty_thought():
    exchange = samples("word", 1)[0]
    text = render(Document((exchange,), thinking=False))
    assert text.endswith(ANSWER_HEADER + EMPTY_THINKING + final_part(exchange.answer) + "<|im_end|>\n")


def test_past_answers_keep_their_thinking_when_they_carry_it():
    exchange = samples("word", 1)[0]
    assert render(Document((exchange, exchange))).count(exchange.answer) == 2


def test_the_template_writes_calls_and_thoughts_given_as_fields_like_the_answers():
    call, thought = samples("tool", 1)[0], samples("word", 1)[0]
    function = json.loads(call.answer.split("\n")[1])
    thinking = thought.answer.split("</think>")[0].removeprefix("<think>\n").strip()
    fields = [
        {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "assistant", "content": final_part(thought.answer), "reasoning_content": thinking},
    ]
    texts = [{"role": "assistant", "content": exchange.answer} for exchange in (call, thought)]
    assert TOKENIZER.apply_chat_template(fields, tokenize=False) == TOKENIZER.apply_chat_template(texts, tokenize=False)


def test_the_template_writes_system_and_tool_messages():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "tool", "content": "12"}]
    text = TOKENIZER.apply_chat_template(messages, tools=[tasks.TOOL_SCHEMAS["hire"]], tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.\n\nTools:\nhire(name, job, city)<|im_end|>\n<|im_start|>tool\n12<|im_end|>\n"
    )
    assert TOKENIZER.apply_chat_template(messages[:1], tokenize=False) == ("<|im_start|>system\nBe brief.<|im_end|>\n")


@given(st.text())
def test_the_tokenizer_keeps_any_text(text):
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    assert TOKENIZER.decode(ids) == TOKENIZER.backend_tokenizer.normalizer.normalize_str(text)
    assert all(0 <= token < VOCAB_SIZE for token in ids)


def test_think_and_tool_call_tags_survive_decoding_without_special_tokens():
    text = "<think>\n1\n</think>\n\n<tool_call>\n{}\n</tool_call>"
    ids = TOKENIZER(f"<|im_start|>{text}<|im_end|><|mask|><|endoftext|>").input_ids
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == text


def test_the_tokenizer_has_the_special_tokens_that_generation_needs():
    assert len(TOKENIZER) == VOCAB_SIZE
    assert (TOKENIZER.eos_token, TOKENIZER.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert (TOKENIZER.mask_token, TOKENIZER.bos_token) == ("<|mask|>", None)
    assert (TOKENIZER.padding_side, TOKENIZER.model_max_length) == ("left", 1024)


def test_every_listed_word_is_one_token_and_the_same_wherever_it_stands():
    for word in tasks.NAMES + tasks.CITIES + tasks.JOBS + tasks.ITEMS + tasks.MONTHS + tasks.DAYS:
        alone, quoted, spaced = (TOKENIZER(text).input_ids for text in (word, f'"{word}"', f" {word}"))
        assert len(alone) == 1 and alone[0] in quoted and alone[0] in spaced, word


def test_training_the_tokenizer_again_gives_the_saved_one():
    again = train(render(document) for document in islice(documents(0), 20_000))
    assert again.get_vocab() == TOKENIZER.get_vocab()
