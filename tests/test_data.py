"""Chats as rows: what is read, what is learnt of it, how it is packed, and what is told of what is lost."""

import json
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from clover.objective_clover import check_documents
from clover.training import data, packing
from clover.training.chat_records import AmbiguousColumns
from clover.training.corpus import EMPTY_THINKING, Encoder, documents, messages_of, tools_of
from clover.training.data import (
    DOCUMENT_FEATURES,
    BadRow,
    Collator,
    DataOptions,
    build_rows,
    encode_chat,
    load_chat,
    pack,
)
from clover.training.packing import best_fit

ROOT = Path(__file__).parents[1]
SIZE, IGNORED = 32, -100
PLAIN = DataOptions(max_length=1024, packing=False)
CHAT = [{"role": "user", "content": "Sort: b, a."}, {"role": "assistant", "content": "a, b"}]
LONGER = [*CHAT, {"role": "user", "content": "And: d, c."}, {"role": "assistant", "content": "c, d"}]
ALARM = {"type": "function", "function": {"name": "alarm", "arguments": {"time": "07:30"}}}
HIRE = {"type": "function", "function": {"name": "hire", "arguments": {"name": "Mona", "age": 55}}}
TOOL = {"type": "function", "function": {"name": "alarm", "parameters": {"properties": {"time": {"type": "string"}}}}}


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """A cache of `datasets` that nothing is in yet."""
    datasets.disable_progress_bars()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


def load_tokenizer(template: str | None = None):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "checkpoints" / "clover-tiny", trust_remote_code=True)
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture(scope="module")
def qwen():
    """The small tokenizer with the 35B's template."""
    return load_tokenizer((ROOT / "chat_template.jinja").read_text())


def lines(path: Path, records: list) -> str:
    """Writes JSON lines; text stands as it is, and bytes do."""
    rows = [one if isinstance(one, str | bytes) else json.dumps(one, ensure_ascii=False) for one in records]
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else row.encode() for row in rows) + b"\n")
    return str(path)


def corpus_records(count: int, seed: int = 0) -> list[dict]:
    found = islice(documents(seed), count)
    return [{"messages": messages_of(document), "tools": tools_of(document)} for document in found]


def learnt(row: dict, tokenizer) -> list[str]:
    """The text of each run of labels."""
    chosen = np.array(row["labels"]) != IGNORED
    edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False)).tolist()
    return [tokenizer.decode(row["input_ids"][a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def one_row(path: Path, record: dict, tokenizer, **changes) -> dict:
    rows, _ = build_rows([lines(path / "chat.jsonl", [record])], tokenizer, replace(PLAIN, **changes))
    (row,) = rows
    return row


# ---- what is learnt --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thinking, train_on", [(True, "all"), (False, "last")])
def test_ids_and_labels_are_those_of_the_encoder_of_the_small_corpus(thinking, train_on, tokenizer, tmp_path):
    found = [document for document in islice(documents(3), 400) if document.thinking == thinking]
    records = [{"messages": messages_of(one), "tools": tools_of(one)} for one in found]
    if not thinking:
        for record in records:
            record["messages"][-1]["content"] = EMPTY_THINKING + record["messages"][-1]["content"]
    rows, report = build_rows([lines(tmp_path / "a.jsonl", records)], tokenizer, replace(PLAIN, train_on=train_on))
    assert len(rows) == len(found) > 20
    for row, (ids, mask) in zip(rows, Encoder(tokenizer)(found), strict=True):
        assert row["input_ids"][: len(ids)] == ids
        assert row["labels"][: len(ids)] == [token if m else IGNORED for token, m in zip(ids, mask, strict=True)]
        assert row["input_ids"][len(ids) :] == [tokenizer.pad_token_id] * (-len(ids) % SIZE)
    assert report["tokens kept"] == sum(len(ids) for ids, _ in Encoder(tokenizer)(found))


def test_all_answers_are_learnt_or_the_last(tokenizer, tmp_path):
    assert learnt(one_row(tmp_path, {"messages": LONGER}, tokenizer), tokenizer) == ["a, b<|im_end|>", "c, d<|im_end|>"]
    last = one_row(tmp_path, {"messages": LONGER}, tokenizer, train_on="last")
    assert learnt(last, tokenizer) == ["c, d<|im_end|>"]


def test_a_prompts_own_answers_are_not_learnt(tokenizer, tmp_path):
    record = {"prompt": LONGER[:3], "completion": LONGER[3:]}
    assert learnt(one_row(tmp_path, record, tokenizer), tokenizer) == ["c, d<|im_end|>"]


def test_what_follows_the_last_answer_is_left_out(tokenizer, tmp_path):
    record = {"messages": LONGER[:3]}
    assert one_row(tmp_path, record, tokenizer) == one_row(tmp_path, {"messages": CHAT}, tokenizer)


QUESTION = {"role": "user", "content": "Is it raining?"}
ANSWER = {"role": "assistant", "content": "Yes."}
THOUGHT = {"role": "assistant", "reasoning_content": "Clouds.", "content": "Yes."}
SPOKEN = {"role": "assistant", "content": "Yes."}
CALL = {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [ALARM]}
RESULT = {"role": "tool", "content": "set"}


@pytest.mark.parametrize(
    "messages, expected",
    [
        ([QUESTION, THOUGHT], ["Clouds.\n</think>\n\nYes.<|im_end|>"]),
        (
            [QUESTION, {**SPOKEN, "content": "<think>\nClouds.\n</think>\n\nYes."}],
            ["Clouds.\n</think>\n\nYes.<|im_end|>"],
        ),
        ([QUESTION, SPOKEN], ["Yes.<|im_end|>"]),
        (
            [QUESTION, CALL, RESULT, SPOKEN],
            [
                "I look.\n</think>\n\n<tool_call>\n<function=alarm>\n<parameter=time>\n07:30\n</parameter>\n"
                "</function>\n</tool_call><|im_end|>",
                "Yes.<|im_end|>",
            ],
        ),
    ],
)
def test_with_the_35bs_template_a_thought_is_learnt_and_an_empty_one_is_the_prompts(messages, expected, qwen, tmp_path):
    row = one_row(tmp_path, {"messages": messages, "tools": [TOOL]}, qwen)
    assert learnt(row, qwen) == expected
    prompt = qwen.apply_chat_template(
        messages[:-1],
        tools=[TOOL],
        add_generation_prompt=True,
        return_dict=False,
        enable_thinking=messages[-1] is not SPOKEN,
    )
    first = len(row["labels"]) - next(i for i, label in enumerate(reversed(row["labels"])) if label != IGNORED)
    answer = qwen(expected[-1], add_special_tokens=False)["input_ids"]
    assert row["input_ids"][:first] == prompt + answer


def test_an_earlier_answer_that_the_template_writes_without_its_thought_is_refused_with_ways_out(qwen, tmp_path):
    record = {"messages": [QUESTION, THOUGHT, QUESTION, THOUGHT]}
    with pytest.raises(BadRow) as error:
        one_row(tmp_path, record, qwen)
    assert re.search(
        r"chat.jsonl:1: message 2 is not .* generated.*train_on='each'.*train_on='last'.*preserve_thinking",
        str(error.value),
    )
    answer = "Clouds.\n</think>\n\nYes.<|im_end|>"
    assert learnt(one_row(tmp_path, record, qwen, train_on="last"), qwen) == [answer]
    kept = {"preserve_thinking": True}
    assert learnt(one_row(tmp_path, record, qwen, template_options=kept), qwen) == [answer] * 2
    assert learnt(one_row(tmp_path, record | {"chat_template_kwargs": kept}, qwen), qwen) == [answer] * 2


def test_each_answer_by_itself_is_what_the_last_one_is_of_the_conversation_up_to_it(qwen, tokenizer, tmp_path):
    short = {"messages": [QUESTION, THOUGHT]}
    both = {"messages": [QUESTION, THOUGHT, QUESTION, THOUGHT]}
    for using in (qwen, tokenizer):
        rows, report = build_rows(
            [lines(tmp_path / "a.jsonl", [both, short])], using, replace(PLAIN, train_on="each", packing=False)
        )
        expected = [one_row(tmp_path, record, using, train_on="last") for record in (short, both, short)]
        assert [row["input_ids"] for row in rows] == [row["input_ids"] for row in expected]
        assert [row["labels"] for row in rows] == [row["labels"] for row in expected]
        assert report["documents kept"] == 3 and report["documents dropped: bad row"] == 0


def test_a_system_text_beside_the_conversation_is_its_first_message(qwen, tmp_path):
    shared = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    written = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
    expected = one_row(tmp_path, {"messages": [*written, {"role": "assistant", "content": "b"}]}, qwen)
    assert one_row(tmp_path, {"conversations": shared, "system": "Be brief."}, qwen) == expected
    table = tmp_path / "a.parquet"
    Dataset.from_list([{"conversations": shared, "system": "Be brief."}]).to_parquet(table)
    assert build_rows([str(table)], qwen, PLAIN)[0][0]["input_ids"] == expected["input_ids"]


def test_an_answer_of_weight_0_is_read_and_not_learnt(qwen, tokenizer, tmp_path):
    weighed = [QUESTION, ANSWER | {"weight": 0}, QUESTION, ANSWER | {"weight": 1}]
    for using in (qwen, tokenizer):
        expected = one_row(tmp_path, {"messages": [QUESTION, ANSWER, QUESTION, ANSWER]}, using, train_on="last")
        assert one_row(tmp_path, {"messages": weighed}, using) == expected
    with pytest.raises(BadRow, match="message 2 has the weight 0.5"):
        one_row(tmp_path, {"messages": [QUESTION, ANSWER | {"weight": 0.5}]}, qwen)
    with pytest.raises(BadRow, match="no message of an assistant"):
        one_row(tmp_path, {"messages": [QUESTION, ANSWER | {"weight": 0}]}, qwen)


def test_what_the_template_does_not_read_is_no_option_of_it(qwen, tmp_path):
    for name in ("nonsense", "tokenize", "messages", "add_generation_prompt"):
        with pytest.raises(ValueError, match=f"`template_options` has '{name}', but .* reads .*enable_thinking"):
            one_row(tmp_path, {"messages": CHAT}, qwen, template_options={name: True})
        with pytest.raises(BadRow, match=f"a.jsonl:1: `chat_template_kwargs` has '{name}'|chat.jsonl:1: .*'{name}'"):
            one_row(tmp_path, {"messages": CHAT, "chat_template_kwargs": {name: True}}, qwen)


def test_one_json_list_is_no_json_lines(qwen, tmp_path):
    for indent, message in ((None, "a file of one JSON list must be made one of JSON lines"), (1, "is one JSON list")):
        (tmp_path / "a.json").write_text(json.dumps([{"messages": CHAT}] * 2, indent=indent))
        with pytest.raises(ValueError, match=message):
            build_rows([str(tmp_path / "a.json")], qwen, PLAIN)


MARKED = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content + END }}{% endgeneration %}{{ REST }}
    {%- else %}{{- message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.mark.parametrize("end, rest", [("<|im_end|>", "\\n"), ("", "<|im_end|>\\n"), ("<|im_end|>\\n", "")])
def test_answers_that_a_template_marks_are_learnt_with_the_token_that_ends_them(end, rest, tokenizer, tmp_path):
    marked = load_tokenizer(MARKED.replace("END", f"'{end}'").replace("REST", f"'{rest}'"))
    for train_on in ("all", "last"):
        expected = one_row(tmp_path, {"messages": LONGER}, tokenizer, train_on=train_on)
        assert one_row(tmp_path, {"messages": LONGER}, marked, train_on=train_on) == expected


def test_an_answer_that_ends_differently_where_it_is_the_last_is_refused(tokenizer, tmp_path):
    last = load_tokenizer(
        tokenizer.chat_template.replace(
            "{%- if add_gen", "{{- '<|endoftext|>' if not add_generation_prompt }}{%- if add_gen"
        )
    )
    assert learnt(one_row(tmp_path, {"messages": CHAT}, last), last) == ["a, b<|im_end|>"], "where generation stops"
    with pytest.raises(BadRow, match=r"message 2 is not .* gives .*endoftext.*, but .*im_start"):
        one_row(tmp_path, {"messages": LONGER}, last)


def test_a_template_that_does_not_end_answers_is_refused(tmp_path):
    template = (
        "{% for m in messages %}{{ m.role + '\\n' + m.content + '\\n' }}{% endfor %}"
        "{{ 'assistant\\n' if add_generation_prompt }}"
    )
    with pytest.raises(BadRow, match="ends an answer with .*it would never stop"):
        one_row(tmp_path, {"messages": CHAT}, load_tokenizer(template))


def test_an_answer_whose_first_token_has_begun_in_the_prompt_is_refused(tokenizer, tmp_path):
    with pytest.raises(BadRow, match=r"chat.jsonl:1: message 2 begins with '\\n\\nYes"):
        one_row(tmp_path, {"messages": [CHAT[0], {"role": "assistant", "content": "\n\nYes"}]}, tokenizer)


text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30).map(lambda s: "x" + s + "x")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(text, text), min_size=1, max_size=3))
def test_whatever_the_text_is_the_answers_and_their_ends_are_learnt(turns):
    tokenizer = load_tokenizer()
    messages = [{"role": r, "content": c} for turn in turns for r, c in zip(("user", "assistant"), turn, strict=True)]
    record = {"number": [0], "source": ["x:1"], "record": [json.dumps({"messages": messages}).encode()]}
    (document,) = encode_chat(Dataset.from_dict(record), tokenizer, PLAIN)
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    assert document["ids"] == whole
    chosen = [token for token, trained in zip(whole, document["trained"], strict=True) if trained]
    normal = tokenizer.backend_tokenizer.normalizer.normalize_str
    assert tokenizer.decode(chosen) == "".join(normal(answer) + "<|im_end|>" for _, answer in turns)


# ---- shapes and files ------------------------------------------------------------------------------------------------

SHAREGPT = [{"from": "human", "value": "Sort: b, a."}, {"from": "gpt", "value": "a, b"}]


@pytest.mark.parametrize(
    "record, column",
    [
        ({"conversations": SHAREGPT}, None),
        ({"conversations": CHAT}, None),
        ({"messages": CHAT, "prompt": "something else", "tools": []}, None),
        ({"prompt": "Sort: b, a.", "completion": "a, b"}, None),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, None),
        ({"messages": [m | {"content": [{"type": "text", "text": m["content"]}]} for m in CHAT]}, None),
        ({"messages": LONGER, "dialogue": SHAREGPT}, "dialogue"),
        ({"messages": LONGER, "question": "Sort: b, a.", "answer": "a, b"}, "question, answer"),
    ],
)
def test_every_shape_of_a_conversation_gives_the_same_row(record, column, tokenizer, tmp_path):
    expected = one_row(tmp_path, {"messages": CHAT}, tokenizer)
    assert one_row(tmp_path, record, tokenizer, column=column) == expected
    # A table gives every row all fields, empty ones too.
    table = pa.Table.from_pylist([record, record | {"extra": b"\xff"}])
    pq.write_table(table, tmp_path / "chat.parquet")
    rows, _ = build_rows([str(tmp_path / "chat.parquet")], tokenizer, replace(PLAIN, column=column))
    assert [row["input_ids"] for row in rows] == [expected["input_ids"]] * 2


def test_openais_arguments_of_a_call_and_other_names_of_reasoning_are_understood(qwen, tmp_path):
    calls = [{"id": "1", "type": "function", "function": {"name": "alarm", "arguments": '{"time": "07:30"}'}}]
    record = {"messages": [QUESTION, CALL], "tools": [TOOL]}
    other = {"role": "assistant", "content": None, "thinking": "I look.", "tool_calls": calls}
    expected = one_row(tmp_path, record, qwen)
    assert one_row(tmp_path, {"messages": [QUESTION, other], "tools": json.dumps([TOOL])}, qwen) == expected


def test_all_kinds_of_files_streamed_or_not_give_the_same_rows(tokenizer, tmp_path):
    records = corpus_records(150)
    for record in records[:2]:  # calls of different functions: a table gives each the other's arguments, as null
        call = ALARM if record is records[0] else HIRE
        record["messages"] = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
        record["tools"] = []
    for record in records:
        record["tools"] = json.dumps(record["tools"])  # as tables of mixed schemas have them
    for part in range(3):
        some = records[part * 50 : part * 50 + 50]
        lines(tmp_path / f"part-{part}.jsonl", some)
        pq.write_table(pa.Table.from_pylist(some), tmp_path / f"part-{part}.parquet", row_group_size=7)
        Dataset.from_list(some).save_to_disk(tmp_path / f"part-{part}")
    DatasetDict(train=Dataset.from_list(records)).save_to_disk(tmp_path / "dataset")
    options = DataOptions(max_length=512)
    kinds = [str(tmp_path / name) for name in ("part-*.jsonl", "part-*.parquet", "part-[012]", "dataset/train")]
    found = []
    for pattern in kinds:
        for streaming in (False, True):
            rows, report = build_rows([pattern], tokenizer, options, streaming=streaming)
            found.append((list(rows), report.as_dict()))
    assert len(found[0][0]) > 10
    assert all(one == found[0] for one in found)


def test_what_datasets_stores_as_json_text_is_read(qwen, tmp_path):
    """As it does, since version 5, with messages whose calls have arguments of different types."""
    calls = [{"function": {"name": "alarm", "arguments": {"time": time}}} for time in ("07:30", 7)]
    records = [{"messages": [QUESTION, CALL | {"tool_calls": [call]}], "tools": [TOOL]} for call in calls]
    file = lines(tmp_path / "a.jsonl", records)
    stored = datasets.load_dataset("json", data_files=file, split="train")
    stored.to_parquet(tmp_path / "a.parquet")
    stored.save_to_disk(tmp_path / "saved")
    assert "json" in str(pq.read_schema(tmp_path / "a.parquet").field("messages").type)
    expected = list(build_rows([file], qwen, PLAIN)[0])
    for name in ("a.parquet", "saved"):
        assert list(build_rows([str(tmp_path / name)], qwen, PLAIN)[0]) == expected


def test_several_files_are_read_in_the_order_given(tokenizer, tmp_path):
    a, b = lines(tmp_path / "a.jsonl", [{"messages": CHAT}]), lines(tmp_path / "b.jsonl", [{"messages": LONGER}])
    records = load_chat([b, a])
    assert records["source"][:] == [f"{b}:1", f"{a}:1"]
    assert records["number"][:] == [0, 1]


@pytest.mark.parametrize("column, used", [("messages", CHAT), ("conversations", LONGER)])
def test_two_columns_of_conversations_are_refused_unless_one_is_named(column, used, tokenizer, tmp_path):
    record = {"messages": CHAT, "conversations": LONGER}
    for on_bad_row in ("error", "skip"):
        with pytest.raises(AmbiguousColumns, match="messages and conversations: say by `column`"):
            one_row(tmp_path, record, tokenizer, on_bad_row=on_bad_row)
    expected = one_row(tmp_path, {"messages": used}, tokenizer)
    assert one_row(tmp_path, record, tokenizer, column=column) == expected


def test_files_that_hold_no_chats_are_refused_before_anything_is_read(tokenizer, tmp_path):
    def complaint(*files) -> str:
        with pytest.raises((ValueError, OSError)) as error:
            build_rows([str(tmp_path / file) for file in files], tokenizer, PLAIN)
        return str(error.value)

    lines(tmp_path / "chat.jsonl", [{"messages": CHAT}])
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "chat.csv").write_text("messages")
    (tmp_path / "bad.parquet").write_text("messages")
    pq.write_table(pa.Table.from_pylist([{"text": "a", "label": 1}]), tmp_path / "text.parquet")
    (tmp_path / "folder").mkdir()
    DatasetDict(a=Dataset.from_list([{"messages": CHAT}]), b=Dataset.from_list([])).save_to_disk(tmp_path / "splits")
    assert "missing*.jsonl" in complaint("chat.jsonl", "missing*.jsonl")
    assert "no rows" in complaint("empty.jsonl")
    assert ".jsonl" in complaint("chat.csv") and ".csv" in complaint("chat.csv")
    assert "bad.parquet" in complaint("bad.parquet")
    assert "text, label" in complaint("text.parquet") and "`column`" in complaint("text.parquet")
    assert "*.parquet" in complaint("folder")
    assert f"{tmp_path / 'splits' / 'a'} or" in complaint("splits")


def test_a_tokenizer_without_a_template_or_padding_is_refused(tmp_path):
    file = lines(tmp_path / "a.jsonl", [{"messages": CHAT}])
    for name in ("chat_template", "pad_token"):
        tokenizer = load_tokenizer()
        setattr(tokenizer, name, None)
        with pytest.raises(ValueError, match=name):
            build_rows([file], tokenizer, PLAIN)


# ---- bad rows --------------------------------------------------------------------------------------------------------


def chat(content: object = "a", **changes) -> dict:
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": content} | changes]}


BAD = [
    ('{"messages": [', "not JSON"),
    (b'{"messages": "\xff"}', "not UTF-8.*0xff"),
    ("[1]", "not a JSON object, but a list"),
    ("[" * 100_000, "not JSON"),
    ({"text": "a", "id": 1}, "no messages, no conversations.* but text, id"),
    ({"prompt": "a"}, "no prompt with a completion, but prompt"),
    ({"messages": "a"}, "messages must be a list of messages, not text"),
    ({"messages": []}, "messages is an empty list"),
    ({"messages": ["a"]}, "message 1 of messages must be an object, not text"),
    ({"messages": CHAT[:1]}, "no message of an assistant"),
    ({"messages": CHAT, "system": 5}, "system must be text"),
    ({"messages": [{"role": "system", "content": "a"}, *CHAT], "system": "b"}, "leave one out"),
    ({"messages": CHAT, "functions": [{"name": "a"}]}, "give them as tools"),
    ({"messages": [{"content": "a"}, CHAT[1]]}, "message 1 of messages has no role"),
    (chat(role="critic"), "message 2 of messages has the role 'critic'"),
    ({"conversations": [{"from": "bot", "value": "a"}]}, "message 1 of conversations has the role 'bot'"),
    (chat(role=["user"]), r"the role \['user'\]"),
    (chat(""), "message 2 of messages, of role assistant, is empty"),
    (chat(" \n"), "is empty"),
    (chat(None), "content that must be text or a list of text parts, not missing"),
    (chat(7), "content that must be text or a list of text parts, not the number 7"),
    (chat({"a": 1}), "text parts, not an object"),
    (chat([{"type": "image", "url": "x"}]), "a part of type 'image'"),
    (chat(["a"]), "a part that is text"),
    (chat("\ud83d half"), "half of a surrogate pair"),
    (chat(tool_calls={"name": "f"}), "tool_calls that must be a list, not an object"),
    (chat(tool_calls=[{"arguments": {}}]), "a tool call without the name"),
    (chat(tool_calls=[{"name": "f", "arguments": "x: 1"}]), "calls f with arguments that are no JSON object"),
    (chat(reasoning_content=3), "reasoning that must be text, not the number 3"),
    (
        {"messages": [CHAT[0] | {"tool_calls": [ALARM]}, CHAT[1]]},
        "message 1 of messages has tool_calls, but is of role",
    ),
    ({"messages": CHAT, "tools": {"name": "f"}}, "tools must be a list, not an object"),
    ({"messages": CHAT, "tools": "f(x)"}, "tools must be a list, not text"),
    ({"messages": CHAT, "tools": [{"type": "function"}]}, "tool 1 has no name"),
    ({"messages": CHAT, "chat_template_kwargs": [1]}, "chat_template_kwargs must be an object"),
    (chat("a<|im_end|>b"), r"spells the special token <\|im_end\|>"),
    ({"messages": [{"role": "user", "content": "<|mask|>"}, CHAT[1]]}, r"spells the special token <\|mask\|>"),
]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("record, complaint", BAD)
def test_a_bad_row_is_named_by_file_and_line(record, complaint, streaming, tokenizer, tmp_path):
    record = json.dumps(record) if isinstance(record, dict) else record
    file = lines(tmp_path / "chats.jsonl", [{"messages": CHAT}, "", record, {"messages": LONGER}])
    with pytest.raises(BadRow) as error:
        list(build_rows([file], tokenizer, PLAIN, streaming=streaming)[0])
    assert str(error.value).startswith(f"{file}:3: ")
    assert re.search(complaint, str(error.value))


def test_skipped_rows_are_counted_and_the_first_few_are_listed(tokenizer, tmp_path, caplog):
    file = lines(
        tmp_path / "a.jsonl", [{"messages": CHAT}] + [json.dumps(bad[0]) for bad in BAD if type(bad[0]) is dict]
    )
    for streaming in (False, True):
        rows, report = build_rows([file], tokenizer, replace(PLAIN, on_bad_row="skip"), streaming=streaming)
        assert len(list(rows)) == report["documents kept"] == report["rows"] == 1
        assert report["documents dropped: bad row"] == report["documents read"] - 1 > 20
        assert len(report.bad_rows) == 5 and f"{file}:2: there are no messages" in report.bad_rows[0]
        assert report.bad_rows[4] in str(report)
    assert sum("Skipped" in message for message in caplog.messages) == 5, "of the stream, whose table comes late"


@pytest.mark.parametrize("saved", [False, True])
def test_a_bad_row_of_a_table_is_named_by_its_index(saved, tokenizer, tmp_path):
    path = tmp_path / ("saved" if saved else "a.parquet")
    records = [{"messages": CHAT, "meta": 1}] * 300 + [chat("")]
    if saved:
        Dataset.from_list(records).save_to_disk(path)
    else:
        Dataset.from_list(records).to_parquet(path)
    with pytest.raises(BadRow, match=re.escape(f"{path}:row 300: ") + "message 2 of messages"):
        build_rows([str(path)], tokenizer, PLAIN)


def test_what_a_template_refuses_is_named_with_its_reason(qwen, tmp_path):
    messages = [*CHAT, {"role": "system", "content": "Be brief."}, *CHAT]
    with pytest.raises(BadRow, match="chat.jsonl:1: the chat template refuses it: A system message must come first"):
        one_row(tmp_path, {"messages": messages}, qwen)


def test_special_tokens_in_texts_are_read_as_such_where_that_is_allowed(tokenizer, tmp_path):
    record = {"messages": [{"role": "user", "content": "What is <|mask|>?"}, CHAT[1]]}
    row = one_row(tmp_path, record, tokenizer, special_tokens="allow")
    assert tokenizer.mask_token_id in row["input_ids"]


# ---- what is too long ------------------------------------------------------------------------------------------------


@pytest.fixture
def long_chats(tmp_path):
    """One that fits, one whose answer begins within 64 tokens, one whose answer does not."""
    records = [{"messages": CHAT}]
    for question, answer in (("q", 200), ("q" * 300, 1)):
        records.append(
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "7" * answer}]}
        )
    return lines(tmp_path / "chats.jsonl", records)


def test_documents_that_are_too_long_are_dropped_and_counted(long_chats, tokenizer):
    rows, report = build_rows([long_chats], tokenizer, replace(PLAIN, max_length=64))
    assert len(rows) == report["documents kept"] == 1
    assert report["documents dropped: too long"] == 2
    assert report["trained tokens read"] - report["trained tokens kept"] == 201 + 2
    assert report["tokens kept"] < 64 < report["tokens read"]


def test_documents_that_are_too_long_are_cut_where_something_is_left_to_learn(long_chats, tokenizer):
    options = replace(PLAIN, max_length=64, too_long="truncate")
    rows, report = build_rows([long_chats], tokenizer, options)
    whole = list(build_rows([long_chats], tokenizer, PLAIN)[0])
    assert [report[f"documents {name}"] for name in ("kept", "truncated", "dropped: too long")] == [2, 1, 1]
    assert rows[1]["input_ids"] == whole[1]["input_ids"][:64] and rows[1]["labels"] == whole[1]["labels"][:64]
    kept = sum(label != IGNORED for row in rows for label in row["labels"])
    assert report["trained tokens kept"] == kept < report["trained tokens read"]


def test_documents_that_are_too_long_are_an_error_by_name_even_where_bad_rows_are_skipped(long_chats, tokenizer):
    options = replace(PLAIN, max_length=64, too_long="error", on_bad_row="skip")
    with pytest.raises(BadRow, match=rf"{long_chats}:2: \d+ tokens are more than `max_length`, 64"):
        build_rows([long_chats], tokenizer, options)


def test_nothing_left_to_learn_is_an_error_with_the_report(long_chats, tokenizer):
    with pytest.raises(ValueError, match=r"nothing of .* is left(.|\n)*too long +2"):
        build_rows(
            [lines(Path(long_chats), Path(long_chats).read_text().splitlines()[1:])],
            tokenizer,
            replace(PLAIN, max_length=64),
        )


def test_an_unmarked_answer_leaves_nothing_to_learn_and_is_counted(tmp_path):
    template = MARKED.replace("END", "'<|im_end|>'").replace("REST", "''")
    unmarked = load_tokenizer(template.replace("== 'assistant' %}{% gen", "== 'assistant' and message.name %}{% gen"))
    named = [CHAT[0], CHAT[1] | {"name": "Mona"}]
    file = lines(tmp_path / "a.jsonl", [{"messages": named}, {"messages": CHAT}])
    _, report = build_rows([file], unmarked, PLAIN)
    assert report["documents dropped: nothing to learn"] == report["documents kept"] == 1


# ---- packing ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 9), max_size=60))
def test_no_bin_is_overfull_and_no_two_could_be_one(sizes):
    bins = best_fit(sizes, 9)
    assert sorted(item for items in bins for item in items) == list(range(len(sizes)))
    loads = sorted(sum(sizes[item] for item in items) for items in bins)
    assert all(0 < load <= 9 for load in loads)
    assert len(loads) < 2 or loads[0] + loads[1] > 9
    assert all(items == sorted(items) for items in bins) and bins == sorted(bins)


def as_documents(drawn: list[tuple[int, int]]) -> Dataset:
    """Documents of `length` distinct ids, all after the first `prompt` of them learnt; without length, dropped ones."""
    columns = {name: [] for name in DOCUMENT_FEATURES}
    for number, (length, prompt) in enumerate(drawn):
        ids = [1000 * (number + 1) + i for i in range(length)]
        values = {"number": number, "source": f"x:{number}", "ids": ids, "problem": "x" if not length else ""}
        values |= {"trained": [i >= prompt for i in range(length)], "dropped": "" if length else "bad row"}
        values |= {"tokens": length, "trained_tokens": sum(values["trained"])}
        for name, value in values.items():
            columns[name].append(value)
    return Dataset.from_dict(columns, features=DOCUMENT_FEATURES)


@settings(deadline=None, max_examples=80)
@given(
    st.lists(
        st.integers(0, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, max(0, n - 1)))),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from([1, 4, 8]),
    st.sampled_from([40, 64]),
    st.booleans(),
    st.integers(1, 60),
)
def test_every_kept_token_is_in_one_row_in_order_and_on_the_grid(drawn, size, max_length, packed, window):
    options = DataOptions(max_length=max_length, block_size=size, packing=packed)
    found, report = as_documents(drawn), data.Report()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WINDOW_DOCUMENTS", window)
        rows = list(pack(found, options, pad_token_id=0))
        streamed = list(pack(found.to_iterable_dataset(), options, pad_token_id=0, report=report))
    assert rows == streamed
    seen = {}
    for row in rows:
        ids, labels, of = (np.array(row[name]) for name in ("input_ids", "labels", "document_ids"))
        assert len(ids) == len(labels) == len(of) <= max_length and len(ids) % size == 0
        check_documents(torch.tensor(of)[None], size)
        assert (of[::size] >= 0).all(), "no row has a block of padding alone"
        assert sorted(set(of[of >= 0].tolist())) == list(range(of.max() + 1))
        assert packed or of.max() == 0
        assert (ids[of < 0] == 0).all() and (labels[of < 0] == IGNORED).all()
        for document in range(of.max() + 1):
            tokens = ids[of == document]
            number = tokens[0] // 1000 - 1
            assert number not in seen
            seen[number] = (tokens.tolist(), labels[of == document].tolist())
    for number, (length, prompt) in enumerate(drawn):
        ids = [1000 * (number + 1) + i for i in range(length)]
        expected = (ids, [IGNORED] * prompt + ids[prompt:])
        assert seen.get(number) == (expected if length else None)
    assert len({row["noise_seed"] for row in rows}) == len(rows)
    assert report["tokens kept"] == report["tokens read"] == sum(length for length, _ in drawn)
    assert report["trained tokens kept"] == sum(length - prompt for length, prompt in drawn)
    assert report["documents kept"] + report["documents dropped: bad row"] == len(drawn)
    assert (report["rows"], report["positions"]) == (len(rows), sum(len(row["input_ids"]) for row in rows))


def test_packing_leaves_little_padding_and_the_table_says_how_much(tokenizer, tmp_path):
    options = DataOptions(max_length=1024, block_size=8)
    rows, report = build_rows([lines(tmp_path / "a.jsonl", corpus_records(600))], tokenizer, options)
    ids = np.concatenate([row["document_ids"] for row in rows])
    padding = (ids < 0).mean()
    assert padding < 0.07, "half a block in ten"
    assert len(rows) <= len(ids) / 1024 + 1
    assert f"{len(rows):,} of {len(ids):,} positions, {padding:.1%} padding" in str(report)


def test_noise_and_order_follow_from_the_seed_alone(tokenizer, tmp_path):
    records = corpus_records(200)
    first = lines(tmp_path / "a.jsonl", records)
    (tmp_path / "other").mkdir()
    second = lines(tmp_path / "other" / "b.jsonl", records)
    options = DataOptions(max_length=512)
    rows = list(build_rows([first], tokenizer, options)[0])
    assert list(build_rows([second], tokenizer, options)[0]) == rows
    others = list(build_rows([first], tokenizer, replace(options, seed=1))[0])
    assert not {row["noise_seed"] for row in rows} & {row["noise_seed"] for row in others}
    assert sorted(map(str, (row["input_ids"] for row in rows))) == sorted(
        map(str, (row["input_ids"] for row in others))
    )
    assert all(0 <= row["noise_seed"] < 2**62 for row in rows + others)


def test_rows_of_many_short_documents_do_not_come_first():
    drawn = [(64 if number % 2 else 1 + number * 7919 % 13, 0) for number in range(500)]
    rows = pack(as_documents(drawn), DataOptions(max_length=64, block_size=1), pad_token_id=0)
    many = [max(row["document_ids"]) > 2 for row in rows]
    half = len(many) // 2
    assert sum(many) > 20 and abs(sum(many[:half]) - sum(many[half:])) < sum(many) / 3


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, value, allowed",
    [
        ("max_length", 0, "at least 1"),
        ("max_length", 100, "a multiple of `block_size`, 32"),
        ("max_length", 64.0, "an int"),
        ("block_size", True, "an int"),
        ("too_long", "split", "'drop' or 'truncate' or 'error'"),
        ("on_bad_row", "ignore", "'error' or 'skip'"),
        ("train_on", "first", "'all' or 'last' or 'each'"),
        ("special_tokens", "escape", "'refuse' or 'allow'"),
        ("packing", "no", "True or False"),
        ("seed", 0.5, "an int"),
        ("column", "a,b,c", "a column's name, or two"),
        ("column", "", "a column's name, or two"),
        ("template_options", "x", "a dict"),
        ("num_proc", 0, "at least 1"),
    ],
)
def test_an_option_that_is_not_allowed_is_refused_by_name_value_and_what_is(field, value, allowed):
    with pytest.raises(ValueError) as error:
        DataOptions(**{field: value})
    assert all(part in str(error.value) for part in (f"`{field}`", repr(value), allowed))


# ---- caching, processes, workers -------------------------------------------------------------------------------------


def test_what_was_encoded_is_found_again_until_files_options_template_or_code_change(tokenizer, tmp_path, monkeypatch):
    file, calls = tmp_path / "a.jsonl", []
    lines(file, [{"messages": CHAT}])
    original = data.ChatEncoder.__call__
    monkeypatch.setattr(data.ChatEncoder, "__call__", lambda self, batch: calls.append(1) or original(self, batch))

    def fresh(using=tokenizer, **changes) -> bool:
        calls.clear()
        build_rows([str(file)], using, replace(PLAIN, **changes))
        return bool(calls)

    assert fresh()
    assert not fresh()
    assert fresh(train_on="last")
    assert fresh(load_tokenizer(tokenizer.chat_template + "{# changed #}"))
    monkeypatch.setattr(data, "code_stamp", lambda: "another")
    assert fresh()
    lines(file, [{"messages": LONGER}])
    assert fresh()
    assert build_rows([str(file)], tokenizer, PLAIN)[1]["documents read"] == 1


def test_encoding_by_several_processes_gives_the_same_rows(tokenizer, tmp_path):
    file = lines(tmp_path / "a.jsonl", corpus_records(40))
    rows = list(build_rows([file], tokenizer, DataOptions(max_length=256))[0])
    assert list(build_rows([file], tokenizer, DataOptions(max_length=256, num_proc=2))[0]) == rows


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_the_rows_of_one(processes, streaming, tokenizer, tmp_path):
    """Dealt out as accelerate does it; what is read twice at the end fills the last batch."""
    file = lines(tmp_path / "a.jsonl", corpus_records(300))
    rows, _ = build_rows([file], tokenizer, DataOptions(max_length=512), streaming=streaming)
    alone = [row["noise_seed"] for row in rows]
    dealt = []
    for index in range(processes):
        loader = DataLoader(rows, batch_size=2, collate_fn=Collator(tokenizer.pad_token_id, SIZE))
        loader = prepare_data_loader(
            loader, num_processes=processes, process_index=index, put_on_device=False, dispatch_batches=False
        )
        dealt.append([batch["noise_seeds"].tolist() for batch in loader])
    assert len({len(batches) for batches in dealt}) == 1
    together = [seed for step in zip(*dealt, strict=True) for batch in step for seed in batch]
    assert together[: len(alone)] == alone
    assert set(together) == set(alone)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_streamed_report_grows_is_of_one_pass_and_comes_from_workers_too(workers, tokenizer, tmp_path):
    file = lines(tmp_path / "a.jsonl", corpus_records(200) + ["{"])
    options = DataOptions(max_length=512, on_bad_row="skip")
    _, expected = build_rows([file], tokenizer, options)
    rows, report = build_rows([file], tokenizer, options, streaming=True)
    assert report["rows"] == 0
    loader = DataLoader(rows, batch_size=4, collate_fn=Collator(tokenizer.pad_token_id, SIZE), num_workers=workers)
    for _ in range(2):
        assert sum(len(batch["input_ids"]) for batch in loader) == expected["rows"]
        assert report.as_dict() == expected.as_dict()


# ---- batches ---------------------------------------------------------------------------------------------------------


def row_of(length: int, **extra) -> dict:
    ids = list(range(1, length + 1))
    return {"input_ids": ids, "labels": ids, "document_ids": [0] * length, "noise_seed": 2**62 - length} | extra


def test_rows_are_padded_to_the_longest_and_other_columns_pass():
    rows = [row_of(8, decoding_order=[3] * 8), row_of(4, decoding_order=[2] * 4)]
    batch = Collator(pad_token_id=7, block_size=4)(rows)
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "input_ids": (2, 8),
        "labels": (2, 8),
        "document_ids": (2, 8),
        "decoding_order": (2, 8),
        "noise_seeds": (2,),
    }
    assert all(value.dtype == torch.long for value in batch.values())
    padding = {"input_ids": 7, "labels": IGNORED, "document_ids": -1, "decoding_order": 0}
    for name, value in padding.items():
        assert batch[name][0].tolist() == rows[0][name]
        assert batch[name][1].tolist() == rows[1][name] + [value] * 4
    assert batch["noise_seeds"].tolist() == [2**62 - 8, 2**62 - 4]


def test_a_batch_ends_with_a_block_and_has_the_length_that_is_asked_for():
    assert Collator(0, 4)([row_of(5)])["labels"].shape == (1, 8)
    assert Collator(0, 4, length=16)([row_of(5)])["labels"].shape == (1, 16)
    with pytest.raises(ValueError, match="a row has 5 tokens, but `length` is 4"):
        Collator(0, 4, length=4)([row_of(5)])
    with pytest.raises(ValueError, match="`length` is 6"):
        Collator(0, 4, length=6)


def test_rows_can_have_any_format(tokenizer, tmp_path):
    rows, _ = build_rows([lines(tmp_path / "a.jsonl", corpus_records(9))], tokenizer, PLAIN)
    expected = Collator(0, SIZE)(list(rows))
    for kind in ("numpy", "torch"):
        batch = Collator(0, SIZE)(list(rows.with_format(kind)))
        assert all(torch.equal(batch[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "rows, complaint",
    [
        ([{"input_ids": [1], "labels": [1]}], "no document_ids and no noise_seed, but input_ids, labels"),
        ([row_of(4), row_of(4, weight=[1] * 4)], "different columns"),
        ([row_of(4, weight=[1] * 3)], "`weight` must have a number for each of the 4 tokens"),
        ([row_of(4, source=5)], "`source` must have a number"),
    ],
)
def test_rows_that_make_no_batch_are_refused(rows, complaint):
    with pytest.raises(ValueError, match=complaint):
        Collator(0, 4)(rows)
