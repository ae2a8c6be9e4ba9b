"""Answers and in which order they were decoded; judging and comparing models by what they generate."""

import json
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModel, AutoTokenizer

from clover.training.__main__ import run
from clover.training.commands import status_of
from clover.training.corpus import heldout, write_chats
from clover.training.evaluate import evaluate
from clover.training.judge import Question, answered, check_fit, final_part, make_judge, read_questions
from clover.training.ladder import climb, table
from clover.training.plots import draw
from clover.training.trajectories import trajectories

CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "clover-tiny"
COUNT, BUDGET = 8, {"max_new_tokens": 96}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT, trust_remote_code=True)


@pytest.fixture(scope="module")
def model():
    return AutoModel.from_pretrained(CHECKPOINT, trust_remote_code=True, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("chats") / "heldout.jsonl"
    write_chats(path, "heldout", COUNT)
    return read_questions(path)


@pytest.fixture(scope="module")
def rows(model, tokenizer, questions):
    return list(trajectories(model, tokenizer, questions, batch_size=4, only_right=False, **BUDGET))


# ---- trajectories ----------------------------------------------------------------------------------------------------


def test_a_row_is_the_prompt_and_the_answer_that_one_token_per_pass_gives(model, tokenizer, questions, rows):
    given = answered(model, tokenizer, questions, threshold=1.0, **BUDGET)
    assert len(rows) == sum(one.ended for one in given) > COUNT // 2
    for row, one in zip(rows, [one for one in given if one.ended], strict=True):
        learnt = [token for token in row["labels"] if token != -100]
        assert tokenizer.decode(learnt[:-1]) == one.text and len(learnt) == one.tokens
        assert len(row["input_ids"]) % 32 == 0
        assert row["document_ids"].count(-1) == len(row["input_ids"]) - row["document_ids"].count(0) < 32


def test_within_a_block_each_pass_decoded_one_position_and_blocks_follow_one_another(rows):
    for row in rows:
        answer = [i for i, label in enumerate(row["labels"]) if label != -100]
        order = row["decoding_order"]
        assert len({order[i] for i in answer}) == len(answer)
        for i in answer:
            for j in answer:
                assert i // 32 >= j // 32 or order[i] < order[j]
        passes = max(order)
        assert all(order[i] == passes for i in range(answer[0]))  # the prompt was never decoded


def test_states_on_the_way_are_those_of_the_generation(model, tokenizer, questions, rows):
    """What masks by the order show is what the trace of the same answer had filled at that time."""
    question = questions[0]
    row = next(iter(trajectories(model, tokenizer, [question], only_right=False, **BUDGET)))
    from clover.objective_clover import answer_blocks, mask_blocks

    batch = {name: torch.tensor([row[name]]) for name in ("input_ids", "labels", "document_ids", "decoding_order")}
    mask, pad = model.config.mask_token_id, model.config.pad_token_id
    blocks = answer_blocks(batch["input_ids"], batch["labels"], batch["document_ids"], 32, pad)
    order = batch["decoding_order"].unflatten(1, (-1, 32))[blocks.row, blocks.block]
    noisy = mask_blocks(blocks, torch.tensor([3]), mask, False, order)
    for i in range(len(noisy.row)):
        open_ = noisy.answer[i] | noisy.tail[i]
        shown = open_ & ~noisy.masked[i]
        if shown.any():
            assert order[i][shown].max() <= order[i][noisy.masked[i]].min()


def test_a_row_can_be_what_the_model_writes_autoregressively(model, tokenizer, questions):
    rows = list(trajectories(model, tokenizer, questions, only_right=False, decoding="self_speculative", **BUDGET))
    given = answered(model, tokenizer, questions, decoding="autoregressive", **BUDGET)
    assert len(rows) == sum(one.ended for one in given) > COUNT // 2
    for row, one in zip(rows, [one for one in given if one.ended], strict=True):
        learnt = [token for token in row["labels"] if token != -100]
        assert tokenizer.decode(learnt[:-1]) == one.text and len(learnt) == one.tokens
        assert row.keys() == {"input_ids", "labels", "document_ids", "noise_seed"}


def test_answers_that_are_wrong_or_do_not_end_are_left_out(model, tokenizer, questions):
    wrong = [Question(q.messages, q.tools, "something else") for q in questions[:2]]
    assert list(trajectories(model, tokenizer, wrong, **BUDGET)) == []
    assert list(trajectories(model, tokenizer, questions[:2], only_right=False, max_new_tokens=2)) == []


def test_the_model_trains_on_rows(model, rows):
    width = len(rows[0]["input_ids"])
    batch = {name: torch.tensor([rows[0][name]]) for name in rows[0] if name != "noise_seed"}
    with torch.no_grad():
        loss = model(**batch, noise_seeds=torch.tensor([rows[0]["noise_seed"]])).loss
    assert batch["input_ids"].shape[1] == width and loss < 0.5


# ---- judging ---------------------------------------------------------------------------------------------------------


def test_a_judge_counts_what_evaluation_counts(model, tokenizer, questions):
    found = make_judge(tokenizer, questions, Accelerator(cpu=True), batch_size=3, **BUDGET)(model)
    result = evaluate(model, tokenizer, heldout(COUNT), 0.95)["all"]
    assert found == {
        "exact_match": pytest.approx(100 * result.exact_match),
        "tokens_per_forward": pytest.approx(result.tpf),
    }


def test_autoregressive_answers_take_a_pass_a_token(model, tokenizer, questions):
    both = [answered(model, tokenizer, questions, decoding=d, **BUDGET) for d in ("autoregressive", "self_speculative")]
    for one, drafted in zip(*both, strict=True):
        assert (one.text, one.ended, one.tokens) == (drafted.text, drafted.ended, drafted.tokens)
        assert (one.denoising, one.commits) == (0, one.tokens)


def test_thinking_is_no_part_of_what_is_compared():
    assert final_part("<think>\n4 + 4\n</think>\n\n8") == final_part(" 8 ") == "8"


@pytest.mark.parametrize(
    "line",
    [
        "no",
        "[]",
        '{"prompt": "a"}',
        '{"messages": []}',
        '{"messages": [{"role": "user", "content": "a"}]}',
        '{"messages": [{"role": "assistant", "content": "a"}]}',
    ],
)
def test_a_line_that_is_no_question_is_refused_with_its_number(line, tmp_path):
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "q.jsonl").write_text(json.dumps(good) + "\n" + line + "\n")
    assert len(read_questions(tmp_path / "q.jsonl", limit=1)) == 1
    with pytest.raises(ValueError, match=r"q\.jsonl:2: "):
        read_questions(tmp_path / "q.jsonl")


def test_the_ladder_has_a_line_for_each_way_of_training():
    rungs = [climb(name, CHECKPOINT, name, heldout(2)) for name in ("low_confidence", "autoregressive")]
    text = table(rungs)
    assert text.splitlines()[-1].startswith("| autoregressive | autoregressive | 100.0% | 1.00 |")
    assert rungs[0].passes < rungs[1].passes


def test_the_ladder_measures_no_other_model():
    with pytest.raises(ValueError, match="holds a 'qwen3_5_moe_text', but must hold a 'clover_moe': .* convert"):
        climb("stock", CHECKPOINT.parent / "qwen-tiny", "autoregressive", heldout(1))


def test_chats_and_held_out_exchanges_can_be_of_some_tasks(tmp_path):
    write_chats(tmp_path / "a.jsonl", "train", 12, tasks=["tool"])
    assert all("tools" in json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines())
    assert {exchange.task for exchange in heldout(6, tasks=["json", "tool"])} == {"json", "tool"}


def test_questions_come_in_every_form_that_is_trained_on(tmp_path):
    rows = [
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": "a", "completion": "b"},
    ]
    (tmp_path / "q.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    assert read_questions(tmp_path / "q.jsonl") == [Question(({"role": "user", "content": "a"},), None, "b")] * 2
    with pytest.raises(ValueError, match="is 0, but must be at least 1"):
        read_questions(tmp_path / "q.jsonl", limit=0)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_questions(tmp_path / "nowhere.jsonl")


def test_a_question_that_does_not_fit_is_told_before_it_is_asked(tokenizer, questions):
    check_fit(tokenizer, questions, 96, 1024)
    with pytest.raises(ValueError, match="`max_new_tokens` is 1000, but question . has .* at most"):
        check_fit(tokenizer, questions, 1000, 1024)
    with pytest.raises(ValueError, match="`max_new_tokens` is 0"):
        check_fit(tokenizer, questions, 0, 1024)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--exchanges", "0"], "`--exchanges` is 0"),
        (["--row", "a", str(CHECKPOINT), "greedy"], "'greedy', but must have one of"),
        (["--row", "a", "nowhere", "autoregressive"], "nowhere is no folder"),
        (["--markdown", "nowhere/a.md"], "`--markdown` is nowhere/a.md"),
    ],
)
def test_what_the_ladder_cannot_measure_is_told_first(arguments, message, capsys, monkeypatch):
    row = ["--row", "a", str(CHECKPOINT), "low_confidence"]
    monkeypatch.setattr(sys, "argv", ["training", "ladder", *row, *arguments])
    assert status_of(run) == 2
    assert message in capsys.readouterr().err


def test_a_training_is_drawn(tmp_path):
    history = [{"step": 1, "loss": 3.0, "denoising_loss": 2.0}, {"step": 2, "loss": 2.0}, {"step": 2, "eval_loss": 2.5}]
    ratios = [{"step": 1, "loss": [None, *range(9)]}, {"step": 2, "loss": [0.5] * 10}]
    draw(history, ratios, tmp_path / "training.png")
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
