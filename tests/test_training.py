"""The objective replays generation; the trainer resumes, and shares its batches between processes."""

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from clover.training import ablations, batches, tiny
from clover.training.evaluate import ONE_TOKEN_PER_PASS, Result, answer, draw, task_table, threshold_table

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "checkpoints" / "clover-tiny"
SHORT = tiny.Recipe(steps=4, tokens=256)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT, trust_remote_code=True)


@pytest.fixture
def model(tokenizer):
    return tiny.new_model(tiny.tiny_config(tokenizer), seed=3)


def test_a_batch_learns_answers_to_their_end_and_nothing_else(tokenizer):
    batch = next(batches.batches(tokenizer, 32, seed=5, tokens=384))
    count, width = batch["input_ids"].shape
    assert width % 32 == 0 and count * width >= 384
    for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        length = int(mask.sum())
        assert width - length < 32 and (ids[length:] == tokenizer.pad_token_id).all()
        learnt = labels != -100
        assert torch.equal(labels[learnt], ids[learnt]) and not learnt[length:].any()
        text, answers = tokenizer.decode(ids[:length]), tokenizer.decode(ids[learnt])
        last = text.rsplit("<|im_start|>assistant\n", 1)[1].removesuffix("<|im_end|>").rstrip()
        assert last.split("</think>")[-1].strip() in answers and answers.rstrip().endswith("<|im_end|>")
        assert "<|im_start|>" not in answers


def test_a_documents_loss_is_its_own_in_a_batch_of_others(model, tokenizer):
    batch = next(batches.batches(tokenizer, 32, seed=8, tokens=256))
    items = (batch["labels"] != -100).sum()
    parts = [{name: value[row : row + 1] for name, value in batch.items()} for row in range(len(batch["labels"]))]
    alone = sum(model(**part, num_items_in_batch=items).loss for part in parts)
    torch.testing.assert_close(alone, model(**batch).loss, rtol=1e-4, atol=1e-4)


def test_batches_repeat_with_their_seed_and_differ_with_another(tokenizer):
    first, again, other = (
        [batch["input_ids"] for batch in islice(batches.batches(tokenizer, 32, seed, 512), 3)] for seed in (1, 1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_an_autoregressive_step_minimises_the_next_tokens_loss_alone(model, tokenizer):
    batch = next(batches.batches(tokenizer, 32, seed=8, tokens=256))
    count = (batch["labels"] != -100).sum()
    loss, denoising, causal = tiny.loss_of(model, batch, 2 * count, autoregressive=True)
    with torch.no_grad():
        expected = model(**batch).causal_loss
    assert denoising == 0.0
    torch.testing.assert_close(loss, expected / 2, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.tensor(causal), expected, rtol=1e-4, atol=1e-4)


def test_an_interrupted_training_ends_where_an_uninterrupted_one_does(tokenizer, tmp_path, monkeypatch):
    whole = tiny.train(SHORT, tokenizer, tmp_path / "whole", save_every=2)
    steps, whole_sum = [], tiny.sum_gradients

    def interrupted(*arguments):
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        whole_sum(*arguments)

    monkeypatch.setattr(tiny, "sum_gradients", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny.train(SHORT, tokenizer, tmp_path / "parts", save_every=2)
    monkeypatch.setattr(tiny, "sum_gradients", whole_sum)
    parts = tiny.train(SHORT, tokenizer, tmp_path / "parts", save_every=2)
    for (name, a), b in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_two_processes_train_the_model_that_one_does(tokenizer, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    states = []
    for name, launcher in (
        ("one", [sys.executable]),
        ("two", [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]),
    ):
        out = tmp_path / f"{name}-out"
        out.mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (out / file).write_bytes((CHECKPOINT / file).read_bytes())
        options = ["--work", str(tmp_path / name), "--out", str(out), "--steps", "2", "--tokens", "256"]
        subprocess.run([*launcher, "-m", "clover.training.tiny", *options], env=environment, check=True)
        lines = [json.loads(line) for line in open(tmp_path / name / "log.jsonl")]
        assert [line["step"] for line in lines] == [1, 2]
        assert (out / "modeling_clover.py").is_symlink() and (out / "model.safetensors").exists()
        model = tiny.new_model(tiny.tiny_config(tokenizer), 0)
        tiny.load_state(tmp_path / name / "state.safetensors", model, tiny.optimizers(model, tiny.Recipe()))
        states.append(model)
    for (name, a), b in zip(states[0].named_parameters(), states[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5, msg=name)


def test_every_ablation_changes_what_it_names(tokenizer, tmp_path):
    recipe = tiny.Recipe(steps=1, tokens=256)
    losses = {name: ablations.run(name, recipe, tmp_path, documents=4) for name in ablations.VARIANTS}
    assert len({(values["0.5"], values["1"]) for values in losses.values()}) == len(losses)
    assert ablations.run("J", recipe, tmp_path) == losses["J"]  # a finished run is read back


def test_exact_match_needs_the_end_token_and_counts_every_pass(model, tokenizer):
    from clover.training.corpus import heldout

    exchanges = heldout(4, seed=3)
    results = answer(model.eval(), tokenizer, exchanges, ONE_TOKEN_PER_PASS)
    assert [result.correct for result in results] == [0] * 4  # random weights
    assert all(result.denoising >= result.tokens and result.tokens <= 128 for result in results)


def test_tables_and_picture_show_what_was_measured(tmp_path):
    good, all_of_it = Result(10, 9, 200, 40, 10), Result(10, 10, 200, 200, 10)
    assert (good.exact_match, good.tpf) == (0.9, 4.0)
    assert "| sort | 90.0% | 4.00 | 20.0 | 100.0% | 0.95 |" in task_table({"sort": good}, {"sort": all_of_it})
    table = threshold_table({0.95: good, ONE_TOKEN_PER_PASS: all_of_it})
    assert "| 0.95 | 90.0% | 4.00 | 5.00 |" in table and "| one token per pass | 100.0% |" in table
    draw({0.95: good, ONE_TOKEN_PER_PASS: all_of_it}, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
