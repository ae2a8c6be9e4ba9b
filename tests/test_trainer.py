"""The trainer: a step is the same step however it is divided, a resumed run is the uninterrupted one, LoRA is whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from small_clover import MASK, PAD, draw
from transformers import TrainingArguments

from clover.training import train
from clover.training.corpus import write_chats
from clover.training.data import Collator
from clover.training.lora import ADDED, added_parameters, merged, with_lora
from clover.training.trainer import CloverTrainer

SIZE, LENGTHS = 8, (21, 30, 16, 9, 12)


def row(number: int) -> dict:
    """A document whose second half is the answer."""
    length = LENGTHS[number % len(LENGTHS)]
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(1, MASK, (length,), generator=generator).tolist()
    missing = -length % SIZE
    return {
        "input_ids": ids + [PAD] * missing,
        "labels": [-100] * (length // 2) + ids[length // 2 :] + [-100] * missing,
        "document_ids": [0] * length + [-1] * missing,
        "noise_seed": number,
    }


ROWS = Dataset.from_list([row(number) for number in range(24)])


def trained(folder: Path, model=None, resume: Path | None = None, judge=None, **changes):
    """Eight steps of four rows each, so that the second epoch has begun; and the losses logged."""
    arguments = {
        "per_device_train_batch_size": 4,
        "max_steps": 8,
        "logging_steps": 1,
        "save_steps": 4,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "prediction_loss_only": True,
        "label_names": ["labels"],
    }
    trainer = CloverTrainer(
        model=model or draw(),
        args=TrainingArguments(str(folder), **arguments | changes),
        train_dataset=ROWS,
        eval_dataset=ROWS.select(range(4)),
        data_collator=Collator(PAD, SIZE),
        judge=judge,
    )
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return (*trained(folder), folder)


def test_the_loss_falls(whole):
    _, losses, _ = whole
    assert len(losses) == 8 and losses[-1] < losses[0] - 1


def test_a_resumed_run_has_the_losses_and_the_weights_of_the_uninterrupted_one(whole, tmp_path):
    trainer, losses, folder = whole
    resumed, again = trained(tmp_path, model=draw(seed=5), resume=folder / "checkpoint-4")
    assert again == losses
    for (name, a), b in zip(trainer.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("size, steps", [(2, 2), (1, 4)])
def test_accumulated_steps_are_those_of_a_larger_batch(whole, tmp_path, size, steps):
    _, losses = trained(tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=steps)
    assert losses == pytest.approx(whole[1], abs=1e-2)
    assert losses[:3] == pytest.approx(whole[1][:3], abs=1e-4)


def test_gradient_checkpointing_changes_no_loss(whole, tmp_path):
    _, losses = trained(tmp_path, gradient_checkpointing=True)
    assert losses[:3] == pytest.approx(whole[1][:3], abs=1e-4)


def test_bf16_trains_fp32_weights(whole, tmp_path):
    trainer, losses = trained(tmp_path, bf16=True)
    assert losses != whole[1] and losses == pytest.approx(whole[1], abs=0.7)
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}


def test_masks_differ_by_epoch_and_the_parts_of_the_loss_are_logged(whole):
    trainer, _, folder = whole
    entry = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert {"denoising_loss", "causal_loss"} <= set(entry)
    seeds, original = [], trainer.model.forward
    batch = Collator(PAD, SIZE)([row(0)])
    trainer.model.train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            trainer.model, "forward", lambda **kw: (seeds.append(kw["noise_seeds"].item()), original(**kw))[1]
        )
        for epoch in (0.0, 0.9, 1.0, 2.5):
            trainer.state.epoch = epoch
            trainer.compute_loss(trainer.model, dict(batch))
    assert seeds[0] == seeds[1] == 0 and len(set(seeds)) == 3
    ratios = [json.loads(line) for line in (folder / "loss_by_ratio.jsonl").read_text().splitlines()]
    assert len(ratios) == 8 and all(len(entry["loss"]) == 10 for entry in ratios)
    assert any(value is not None and value > 1 for value in ratios[0]["loss"])


def test_evaluation_is_the_same_every_time_and_asks_the_judge(whole, tmp_path):
    trainer, _, _ = whole
    assert trainer.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"]
    modes = []
    trainer.judge = lambda model: (modes.append(model.training), {"exact_match": 50.0})[1]
    found = trainer.evaluate()
    trainer.judge = None
    assert found["eval_exact_match"] == 50.0 and modes == [False]
    assert trainer.state.log_history[-1]["eval_exact_match"] == 50.0


def test_the_best_checkpoint_is_loaded_with_its_experts(tmp_path):
    scores = iter([5.0, 1.0])
    trainer, _ = trained(
        tmp_path,
        judge=lambda model: {"score": next(scores)},
        eval_strategy="steps",
        eval_steps=4,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=True,
    )
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-4")
    best = type(trainer.model).from_pretrained(tmp_path / "checkpoint-4")
    for (name, a), b in zip(trainer.model.named_parameters(), best.named_parameters(), strict=True):
        assert torch.equal(a, b[1]), name


def test_vectors_are_not_decayed(whole):
    trainer, _, _ = whole
    names = trainer.get_decay_parameter_names(trainer.model)
    parameters = dict(trainer.model.named_parameters())
    assert names and all(parameters[name].ndim > 1 for name in names)


# ---- several processes -----------------------------------------------------------------------------------------------


def on_two_processes(*command) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, *map(str, command)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_a_model_sharded_by_fsdp2_has_the_loss_and_the_gradients_of_a_whole_one():
    found = json.loads(on_two_processes(Path(__file__).parent / "run_fsdp2.py").splitlines()[-1])
    assert found["sharded"] == pytest.approx(found["loss"], abs=1e-4)
    assert found["largest"] > 1 and found["worst"] < 1e-4


def test_two_processes_have_the_losses_of_one_with_twice_the_batch(tmp_path):
    """The whole command, on a checkpoint and chats of its own."""
    checkpoint = Path(__file__).parents[1] / "checkpoints" / "clover-tiny"
    write_chats(tmp_path / "chats.jsonl", "train", 60)
    options = ["--model", checkpoint, "--train_files", tmp_path / "chats.jsonl", "--max_length", 128]
    options += ["--max_steps", 3, "--logging_steps", 1, "--save_strategy", "no", "--report_to", "none", "--use_cpu"]
    on_two_processes(
        *("-m", "clover.training.train", *options, "--output_dir", tmp_path / "two"),
        *("--per_device_train_batch_size", 2),
    )
    one = train.main([*map(str, options), "--output_dir", str(tmp_path / "one"), "--per_device_train_batch_size", "4"])
    curves = [json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"] for name in ("two",)]
    curves.append(one.state.log_history)
    two, alone = ([entry["loss"] for entry in curve if "loss" in entry] for curve in curves)
    assert len(two) == len(alone) == 3
    assert two == pytest.approx(alone, abs=2e-3)


# ---- LoRA ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    return (*trained(folder, with_lora(draw(), 4, 8)), folder)


def test_lora_trains_adapters_of_every_matrix_and_the_added_tensors_and_nothing_else(adapted):
    trainer, losses, _ = adapted
    assert losses[-1] < losses[0] - 0.5
    before, after = dict(draw().named_parameters()), trainer.model
    for name, parameter in after.named_parameters():
        if parameter.requires_grad:
            assert "lora_" in name or name.rsplit(".", 1)[-1] in ADDED or "token_adapter" in name, name
        elif "token_adapter" not in name:
            plain = name.removeprefix("base_model.model.").replace("base_layer.", "")
            assert torch.equal(parameter, before[plain]), name
    of = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name, _ in after.named_parameters() if "lora_" in name}
    assert {"q_proj", "o_proj", "in_proj_qkv", "out_proj", "experts", "gate_proj", "down_proj"} <= of
    for name, parameter in added_parameters(after):
        assert not torch.equal(parameter, before[name]), name


def test_a_resumed_lora_has_the_losses_of_the_uninterrupted_one(adapted, tmp_path):
    _, losses, folder = adapted
    _, again = trained(tmp_path, with_lora(draw(), 4, 8), resume=folder / "checkpoint-4")
    assert again == losses


def test_a_merged_model_is_the_adapted_one(adapted):
    trainer, _, folder = adapted
    model = merged(draw(), folder / "checkpoint-8").eval()
    batch = Collator(PAD, SIZE)([row(3), row(4)])
    with torch.no_grad():
        expected, base = trainer.model.eval()(**batch).loss, draw()(**batch).loss
        torch.testing.assert_close(model(**batch).loss, expected, rtol=1e-4, atol=1e-4)
    assert (expected - base).abs() > 0.1
    assert not any("lora" in name for name, _ in model.named_parameters())


def test_lora_without_its_added_tensors_is_refused(adapted, tmp_path):
    _, _, folder = adapted
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (tmp_path / name).write_bytes((folder / "checkpoint-8" / name).read_bytes())
    with pytest.raises(FileNotFoundError, match=r"added\.safetensors"):
        merged(draw(), tmp_path)
    with pytest.raises(ValueError, match="`adapter` is .*merge"):
        draw().load_adapter(str(folder / "checkpoint-8"))
    with pytest.raises(ValueError, match="trained on another model"):
        merged(draw(seed=5), folder / "checkpoint-8")
    with pytest.raises(ValueError, match="`lora_dropout` is 0.1"):
        with_lora(draw(), 4, 8, dropout=0.1)
