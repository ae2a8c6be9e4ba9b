"""Fine-tunes a Clover on chats: one script, on one machine or many.

    python -m clover.training train --model DIR --train_files chats.jsonl --output_dir out
    accelerate launch --config_file training/accelerate/fsdp2.yaml -m clover.training.train --model DIR ... --bf16

Beside the options here all of transformers' TrainingArguments can be given. `--output_dir` gets checkpoints to resume
from (the same command with `--resume_from_checkpoint True`), the finished model, `training.png`, and `data.txt`, a
report of what was kept of the data.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from datasets import Dataset, load_from_disk
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    TrainingArguments,
    set_seed,
)

from ..configuration_clover import CloverConfig
from ..objective_clover import Objective
from .commands import status_of
from .data import Collator, DataOptions, Report, build_rows
from .folders import check_output, checkpoint_to_resume, config_of
from .judge import check_fit, make_judge, read_questions
from .lora import with_lora
from .plots import Plots
from .trainer import CloverTrainer

REPORT = "data.txt"
OF_CHATS = (  # options that say how chats become rows
    "max_length",
    "packing",
    "too_long",
    "on_bad_row",
    "train_on",
    "column",
    "template_options",
    "special_tokens",
    "num_proc",
)


@dataclass
class ModelOptions:
    model: str = field(metadata={"help": "a Clover's folder or name; `convert` makes one of a Qwen3.5-MoE"})
    lora_rank: int = field(default=0, metadata={"help": "train adapters of this rank; 0 trains all weights"})
    lora_alpha: int = field(default=32, metadata={"help": "their scale is alpha / rank"})
    attention: str = field(default="sdpa", metadata={"help": "sdpa or eager"})
    experts: str | None = field(default=None, metadata={"help": "grouped_mm, batched_mm or eager"})


@dataclass
class ChatOptions:
    train_files: list[str] = field(default_factory=list, metadata={"help": "chats: .jsonl or .parquet, patterns too"})
    rows: str | None = field(default=None, metadata={"help": "or a folder of rows: what `trajectories` wrote"})
    eval_files: list[str] = field(default_factory=list, metadata={"help": "chats to measure the loss on"})
    questions: str | None = field(default=None, metadata={"help": "JSON lines of chats to answer at each evaluation"})
    max_questions: int | None = field(default=None, metadata={"help": "only the first so many"})
    max_new_tokens: int = field(default=512, metadata={"help": "of an answer"})
    max_length: int | None = field(default=None, metadata={"help": "positions of a row; 4096, or the context if less"})
    packing: bool = field(default=True, metadata={"help": "several chats a row"})
    too_long: str = field(default="drop", metadata={"help": "what becomes of longer chats: drop, truncate or error"})
    on_bad_row: str = field(default="error", metadata={"help": "error or skip"})
    train_on: str = field(default="all", metadata={"help": "all answers, the last, or each by itself"})
    column: str | None = field(default=None, metadata={"help": "where a row's conversation is, if it cannot be told"})
    template_options: str = field(default="{}", metadata={"help": "JSON: arguments of the chat template"})
    special_tokens: str = field(default="refuse", metadata={"help": "texts that spell one: refuse or allow"})
    num_proc: int = field(default=1, metadata={"help": "processes that encode chats"})
    streaming: bool = field(default=False, metadata={"help": "read as it goes; give --max_steps then"})


@dataclass
class ObjectiveOptions:
    complementary: bool = field(default=Objective.complementary, metadata={"help": "each block with both masks"})
    weighting: str = field(default=Objective.weighting, metadata={"help": "uniform or inverse_ratio"})
    max_weight: float = field(default=Objective.max_weight, metadata={"help": "of inverse_ratio"})
    causal_weight: float = field(default=Objective.causal_weight, metadata={"help": "of the autoregressive loss"})
    tail_weight: float = field(default=Objective.tail_weight, metadata={"help": "of padding after an answer"})
    confidence_weight: float = field(default=Objective.confidence_weight, metadata={"help": "of the entropy term"})


def arguments_of(options: object, kind: type) -> dict:
    """The options that another dataclass has too."""
    return {f.name: getattr(options, f.name) for f in fields(kind) if hasattr(options, f.name)}


def read_rows(folder: str) -> Dataset:
    """Rows that `trajectories` wrote; a `ValueError` on anything else."""
    rows = load_from_disk(folder)
    missing = {"input_ids", "labels", "document_ids", "noise_seed"} - {*getattr(rows, "column_names", [])}
    if not isinstance(rows, Dataset) or missing:
        raise ValueError(f"`rows` is {folder}, but must be a folder that `trajectories` wrote")
    return rows


def data_options(chat: ChatOptions, config: CloverConfig, seed: int) -> DataOptions:
    """The data's options; a `ValueError` by name on what they cannot be."""
    size, context = config.block_size, config.max_position_embeddings
    if chat.max_length is not None and chat.max_length > context:
        raise ValueError(f"`max_length` is {chat.max_length}, but must be at most {context}, the model's context")
    length = min(DataOptions.max_length, context) // size * size if chat.max_length is None else chat.max_length
    try:
        template = json.loads(chat.template_options)
    except json.JSONDecodeError:
        template = chat.template_options  # refused below, with what is allowed
    given = arguments_of(chat, DataOptions) | {"max_length": length, "template_options": template}
    return DataOptions(**given | {"block_size": size, "seed": seed})


def load(options: ModelOptions, objective: Objective, training: TrainingArguments) -> PreTrainedModel | PeftModel:
    """The model; its weights and optimiser states are kept in fp32, `--bf16` computes in bf16 beside them."""
    implementations = {"attn_implementation": options.attention}
    if options.experts:
        implementations["experts_implementation"] = options.experts
    model = AutoModelForCausalLM.from_pretrained(
        options.model, trust_remote_code=True, dtype=torch.float32, **implementations
    )
    model.objective = type(model.objective)(**vars(objective))  # the class of the model's own code
    if options.lora_rank:
        model = with_lora(model, options.lora_rank, options.lora_alpha)
        if training.gradient_checkpointing:
            model.enable_input_require_grads()
    return model


def check(options: ModelOptions, chat: ChatOptions, training: TrainingArguments) -> None:
    """Raises a `ValueError` on what could not be done, or would have no effect, before any work starts."""
    if bool(chat.train_files) == bool(chat.rows):
        raise ValueError(f"`train_files` are {chat.train_files} and `rows` {chat.rows}: one of them must be given")
    if chat.questions and training.fsdp:
        raise ValueError("`questions` are not answered under FSDP, which shards what generation reads: evaluate a save")
    if chat.streaming and training.max_steps <= 0:
        raise ValueError(f"`max_steps` is {training.max_steps}, but must be given with `streaming`: no end is known")
    measured = [name for name in ("eval_files", "questions") if getattr(chat, name)]
    if training.eval_strategy != "no" and not measured:
        raise ValueError(f"`eval_strategy` is {training.eval_strategy}, but there are no `eval_files` or `questions`")
    if training.eval_strategy == "no" and measured:
        raise ValueError(f"`{measured[0]}` have no effect while `eval_strategy` is no: it must be steps or epoch")
    if training.load_best_model_at_end and training.metric_for_best_model == "loss" and not chat.eval_files:
        raise ValueError("`metric_for_best_model` is loss, which needs `eval_files`; `questions` give exact_match")
    if training.label_smoothing_factor:
        raise ValueError(f"`label_smoothing_factor` is {training.label_smoothing_factor}, but must be 0: see objective")
    if options.lora_rank < 0 or options.lora_alpha <= 0:
        raise ValueError(f"`lora_rank` is {options.lora_rank} and `lora_alpha` {options.lora_alpha}: must be positive")
    if not options.lora_rank:
        refuse_given(options, ("lora_alpha",), "without `lora_rank`")
    if not chat.questions:
        refuse_given(chat, ("max_questions", "max_new_tokens"), "without `questions`")
    if chat.rows:
        refuse_given(chat, ("streaming",), "with `rows`")
    if chat.rows and not chat.eval_files:
        refuse_given(chat, OF_CHATS, "with `rows`")


def refuse_given(options: ModelOptions | ChatOptions, names: Sequence[str], when: str) -> None:
    """Raises a `ValueError` on one of some options that is given, though nothing would read it."""
    for option in fields(options):
        value = getattr(options, option.name)
        if option.name in names and value != option.default:
            raise ValueError(f"`{option.name}` is {value}, which has no effect {when}: leave it out")


def main(arguments: list[str] | None = None) -> CloverTrainer:
    kinds = (ModelOptions, ChatOptions, ObjectiveOptions, TrainingArguments)
    parser = HfArgumentParser(kinds, prog="python -m clover.training train", description=__doc__)
    model_options, chat, objective_options, training = parser.parse_args_into_dataclasses(arguments)
    training.remove_unused_columns, training.prediction_loss_only = False, True
    training.label_names = ["labels"]
    output, config = Path(training.output_dir), config_of(model_options.model)
    check(model_options, chat, training)
    training.use_cache = config.use_cache  # by default transformers writes false into the trained model's config
    resume = checkpoint_to_resume(training.resume_from_checkpoint, output, model_options.lora_rank, training.max_steps)
    if resume is None and training.process_index == 0:  # the others would see what this one has begun to write
        check_output(output)
    if chat.streaming:  # each process reads the stream and keeps its own rows: batches of one length are not needed
        training.accelerator_config.dispatch_batches = False
    set_seed(training.seed)
    objective = Objective(**arguments_of(objective_options, Objective))
    # Everything is read before the model, which may take long to load.
    options = data_options(chat, config, training.seed)
    questions = read_questions(Path(chat.questions), chat.max_questions) if chat.questions else []
    tokenizer = AutoTokenizer.from_pretrained(model_options.model, trust_remote_code=True)
    check_fit(tokenizer, questions, chat.max_new_tokens, config.max_position_embeddings)
    if chat.rows:
        rows, report = read_rows(chat.rows), f"{chat.rows}: rows as they are"
    else:
        with training.main_process_first():  # the others find what it has encoded
            rows, report = build_rows(chat.train_files, tokenizer, options, streaming=chat.streaming)
    eval_rows = build_rows(chat.eval_files, tokenizer, options)[0] if chat.eval_files else None
    trainer = CloverTrainer(
        model=load(model_options, objective, training),
        args=training,
        train_dataset=rows,
        eval_dataset=eval_rows if eval_rows is not None else [] if questions else None,
        data_collator=Collator(tokenizer.pad_token_id, config.block_size),
        processing_class=tokenizer,
        callbacks=[Plots()],
    )
    trainer.origin = Path(model_options.model)
    if questions:
        trainer.judge = make_judge(tokenizer, questions, trainer.accelerator, max_new_tokens=chat.max_new_tokens)
    if not chat.streaming:
        tell(trainer, report)
    trainer.train(resume_from_checkpoint=resume)
    if chat.streaming:
        tell(trainer, report)
    if not trainer.state.global_step:
        raise ValueError("not a step was taken: there are no rows, or fewer than a batch and the last one is dropped")
    trainer.save_model()
    trainer.save_state()
    return trainer


def tell(trainer: CloverTrainer, report: Report | str) -> None:
    """What became of the data, on the terminal and beside the model."""
    if trainer.is_world_process_zero():
        print(report, file=sys.stderr)
        output = Path(trainer.args.output_dir)
        output.mkdir(parents=True, exist_ok=True)
        (output / REPORT).write_text(f"{report}\n")


if __name__ == "__main__":
    sys.exit(status_of(main))
