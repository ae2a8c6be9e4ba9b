"""Makes a Clover checkpoint of an autoregressive Qwen3.5-MoE one, or the other way round, shard by shard.

    python -m clover.training convert --from QWEN --to DIR [--mask-token "<|fim_pad|>"] [--block-size 32]
    python -m clover.training convert --reverse --from CLOVER --to DIR

Tensors keep their bits, dtype and layout; each Gated DeltaNet layer gets its four added ones. Memory is bounded by
--max-shard-size: a shard's pages of the source and of the new file are mapped, no more. Everything is checked against
the headers before a file is written. Interrupted, the same command goes on where it stopped: a shard gets its name
only when it is complete and, read again, equal to its source bit by bit.
"""

import argparse
import base64
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors.torch
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
)

from ..configuration_clover import CloverConfig
from ..generation_clover import CloverGenerationConfig
from ..modeling_clover import CloverForDiffusionLM, CloverGatedDeltaNet
from .conversion_source import (
    HEAD,
    INDEX,
    Source,
    Stored,
    check_tensors,
    demand,
    digest,
    expected_shapes,
    mean_row,
    read_json,
    read_source,
    rows_of,
)
from .conversion_target import (
    PARTIAL,
    RECORD,
    Planned,
    Result,
    bits,
    check_space,
    check_target,
    not_carried,
    split_differs,
    write_json,
    write_rest,
    write_shard,
)

MASK_TOKEN = "<|mask|>"
TABLES = ("model.embed_tokens.weight", HEAD)  # what has a row for each token
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
CLOVER_FIELDS = {*CloverConfig.__dataclass_fields__, "mask_id"} - {*Qwen3_5MoeTextConfig.__dataclass_fields__}
AUTO_MAP = {
    "AutoConfig": "configuration_clover.CloverConfig",
    "AutoModel": "modeling_clover.CloverForDiffusionLM",
    "AutoModelForCausalLM": "modeling_clover.CloverForDiffusionLM",
}
VERIFY = ("auto", "logits", "tensors")
LOGITS_UP_TO = 4 * 2**30  # bytes; a larger model runs only where `--verify logits` asks for it


@dataclass(frozen=True)
class Options:
    """What to make. A half-done conversion is continued only with the same options."""

    reverse: bool = False
    block_size: int = 32
    mask_token: str | None = None
    mask_token_id: int | None = None
    max_shard_size: str = "5GB"


@dataclass
class Report:
    """What a conversion did, in numbers; in words as a string."""

    copied: int
    added: int
    left_out: dict[str, int]  # tensors, by kind
    vocabulary: tuple[int, int]  # before and after
    mask_token_id: int | None
    bytes: int
    notes: list[str]
    written: int = 0  # shards
    found: int = 0  # shards that an earlier run has finished
    compared_logits: bool = False

    def __str__(self) -> str:
        left_out = "".join(f", {count} {kind} left out" for kind, count in self.left_out.items())
        logits = "causal logits equal" if self.compared_logits else "causal logits NOT compared (--verify logits)"
        mask = f"; mask token {self.mask_token_id}" if self.mask_token_id is not None else ""
        lines = [
            f"tensors: {self.copied} copied, {self.added} added{left_out}",
            f"vocabulary: {self.vocabulary[0]} before, {self.vocabulary[1]} after{mask}",
            *self.notes,
            f"{self.bytes:,} bytes; shards: {self.written} written, {self.found} found finished",
            f"verified: every tensor equal to its source bit by bit; {logits}",
        ]
        return "\n".join(lines)


def convert(source: Path, target: Path, options: Options | None = None, verify: str = "auto") -> Report:
    """Converts the checkpoint in `source` into a new folder `target`, or goes on where an interrupted run stopped.

    Args:
        verify: "tensors" compares bits; "logits" also runs both models; "auto" does so up to `LOGITS_UP_TO` bytes.
    Raises:
        ValueError: the source is not what it should be, `target` holds something else or its disk has no room (then
            nothing was written), or what was written does not equal the source.
    """
    options = options or Options()
    for name in ("mask_token", "mask_token_id", "block_size") if options.reverse else ():
        given = getattr(options, name)
        demand(given == getattr(Options, name), f"--{name.replace('_', '-')} is {given}, no option of --reverse.")
    is_size = re.fullmatch(r"[1-9]\d*\s*[KMGT]?i?B", options.max_shard_size)
    demand(is_size, f"--max-shard-size is {options.max_shard_size!r}, must be a size such as 5GB or 500MB.")
    demand(verify in VERIFY, f"verify is {verify!r}, must be {' or '.join(VERIFY)}.")
    read = read_source(source, ("clover_moe",) if options.reverse else ("qwen3_5_moe_text", "qwen3_5_moe"))
    identity = {"source": digest(read), "options": asdict(options)}
    check_target(target, identity)
    result = to_autoregressive(read) if options.reverse else to_clover(read, options)
    report = report_of(read, result)
    empty = {name: torch.empty(p.shape, dtype=p.dtype, device="meta") for name, p in result.tensors.items()}
    split = split_torch_state_dict_into_shards(empty, max_shard_size=options.max_shard_size)
    missing = [name for name, file in split.tensor_to_filename.items() if not (target / file).exists()]
    check_space(target, sum(empty[name].nbytes for name in missing))

    target.mkdir(parents=True, exist_ok=True)
    write_json(target / PARTIAL, identity)
    for file, names in split.filename_to_tensors.items():
        wrote = write_shard(target / file, {name: result.tensors[name] for name in names})
        report.written, report.found = report.written + wrote, report.found + (not wrote)
    if split.is_sharded:
        write_json(target / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
    write_rest(target, result)
    if verify == "logits" or (verify == "auto" and report.bytes <= LOGITS_UP_TO):
        compare_logits(read, target, result, options.reverse)
        report.compared_logits = True
    others = not_carried(source)
    report.notes += [f"not carried over: {', '.join(others)}"] if others else []
    report.notes += split_differs(target if options.reverse else source, result.tokenizer)
    (target / PARTIAL).unlink()
    return report


def report_of(source: Source, result: Result) -> Report:
    planned = result.tensors.values()
    copied = sum(p.origin is not None for p in planned)
    dropped = len(source.tensors) - copied
    left_out = dict(source.left_out) | ({"of a Clover's own tensors": dropped} if dropped else {})
    mask = getattr(result.config, "mask_token_id", None)
    size = sum(torch.Size(p.shape).numel() * p.dtype.itemsize for p in planned)
    return Report(copied, len(planned) - copied, left_out, result.vocabulary, mask, size, result.notes)


# ---- what to write -----------------------------------------------------------------------------------------


def on_meta(model_class: type[PreTrainedModel], config_class: type[PreTrainedConfig], fields: dict) -> PreTrainedModel:
    """A model whose tensors have names and shapes, and no memory."""
    try:
        with torch.device("meta"):
            return model_class(config_class(**fields))
    except StrictDataclassError as error:
        raise ValueError(f"config.json: {error}") from None


def to_clover(source: Source, options: Options) -> Result:
    """Plans the Clover of an autoregressive checkpoint."""
    stock = on_meta(Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, source.fields)
    clover = on_meta(CloverForDiffusionLM, CloverConfig, source.fields | {"block_size": options.block_size})
    config, notes = clover.config, []
    size = config.vocab_size
    check_tensors(source.tensors, expected_shapes(stock.state_dict(), config.tie_word_embeddings, source.tensors))
    ids = token_ids(source, config)
    for name in ("eos_token_id", "pad_token_id"):
        if ids[name] is None and source.tokenizer is not None:
            ids[name] = getattr(source.tokenizer, name)
            notes.append(f"{name} is the tokenizer's, {ids[name]}: the source's configs have none")
    mask, is_new = choose_mask(source.tokenizer, size, ids, options)
    if is_new:
        row = "a row without a token" if mask < size else "a row more"
        notes.append(f"the mask token is new; it has {row}, the mean of the rows before it")
    unused = sorted({*(source.generation or {})} - {*TOKEN_IDS, "transformers_version", "_from_model_config"})
    notes += [f"not carried over from generation_config.json: {', '.join(unused)}"] if unused else []

    tensors = clover_tensors(source, added_tensors(clover, stock, source.tensors), size, mask if is_new else None)
    config.vocab_size = max(size, mask + 1)
    config.mask_token_id = mask
    config.pad_token_id = ids["pad_token_id"] if config.pad_token_id is None else config.pad_token_id
    config.dtype = config.dtype or source.tensors[TABLES[0]].dtype
    config.architectures, config.auto_map = ["CloverForDiffusionLM"], AUTO_MAP
    record = {
        "vocab_size": {"before": size, "after": config.vocab_size},
        "mask_token": {"id": mask, "is_new": is_new, "rows_before": rows_before(tensors)},
        "pad_token_id": source.fields.get("pad_token_id"),
        "generation_config": source.generation,
    }
    generation, sizes = generation_of(config, ids, source.tokenizer), (size, config.vocab_size)
    return Result(config, generation, source.tokenizer, tensors, sizes, record, notes=notes)


def clover_tensors(source: Source, added: dict, size: int, new_token: int | None) -> dict[str, Planned]:
    """The source's tensors in their order, each layer's added ones beside its convolution, a row for a new token."""
    tensors = {}
    for name, stored in source.tensors.items():
        tensors[name] = Planned(stored.shape, stored.dtype, stored)
        if new_token is not None and name in TABLES:
            shape, row = (max(size, new_token + 1), stored.shape[1]), (new_token, mean_row(stored, new_token))
            tensors[name] = Planned(shape, stored.dtype, stored, row)
        for other, value in added.get(name, {}).items():
            tensors[other] = Planned(tuple(value.shape), value.dtype, value=value)
    return tensors


def to_autoregressive(source: Source) -> Result:
    """Plans the autoregressive checkpoint of a Clover; what its conversion once added, its record tells."""
    clover = on_meta(CloverForDiffusionLM, CloverConfig, source.fields)
    own = {name: value for name, value in source.fields.items() if name not in CLOVER_FIELDS}
    stock = on_meta(Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, own)
    config, size = stock.config, stock.config.vocab_size
    check_tensors(source.tensors, expected_shapes(clover.state_dict(), config.tie_word_embeddings, source.tensors))
    dropped = {*clover.state_dict()} - {*stock.state_dict()}
    tensors = {name: Planned(s.shape, s.dtype, s) for name, s in source.tensors.items() if name not in dropped}
    config.architectures = ["Qwen3_5MoeForCausalLM"]
    if not (source.folder / RECORD).exists():
        notes = [f"{RECORD} is not there: the vocabulary and the tokenizer stay as they are"]
        generation = {name: id for name, id in token_ids(source, config).items() if id is not None}
        return Result(config, generation, source.tokenizer, tensors, (size, size), notes=notes)

    record = read_json(source.folder / RECORD)
    sizes, mask = record["vocab_size"], record["mask_token"]
    is_its_own = (sizes["after"], mask["id"]) == (size, clover.config.mask_token_id)
    demand(is_its_own, f"{source.folder / RECORD} is not of this checkpoint: without it the vocabulary stays as it is.")
    held = safetensors.torch.load(base64.b64decode(mask["rows_before"]))
    for name in [name for name in TABLES if name in tensors and mask["is_new"]]:
        stored = source.tensors[name]
        row = (mask["id"], held[name].to(stored.dtype)) if name in held else None
        tensors[name] = Planned((sizes["before"], stored.shape[1]), stored.dtype, stored, row)
    config.vocab_size, config.pad_token_id = sizes["before"], record["pad_token_id"]
    forget = mask["id"] if mask["is_new"] else None
    vocabulary = (size, sizes["before"])
    return Result(config, record["generation_config"], source.tokenizer, tensors, vocabulary, forget=forget)


def token_ids(source: Source, config: PreTrainedConfig) -> dict[str, int | list[int] | None]:
    """What begins, ends and pads a text, by generation_config.json first, then by config.json."""
    given = source.generation or {}
    return {name: getattr(config, name) if given.get(name) is None else given[name] for name in TOKEN_IDS}


def choose_mask(tokenizer: PreTrainedTokenizerFast | None, size: int, ids: dict, options: Options) -> tuple[int, bool]:
    """The mask token's id, and whether it is new; a new one is added to the tokenizer, in place, behind its last.

    Raises:
        ValueError: the options name no token, or one that ends or pads; or there is neither a tokenizer nor an id.
    """
    token, id, is_new = options.mask_token, options.mask_token_id, False
    demand(token is None or id is None, "--mask-token and --mask-token-id name one thing twice: give one of them.")
    if tokenizer is None:
        demand(id is not None, "The source has no tokenizer: --mask-token-id must say which token is the mask.")
        demand(0 <= id <= size, f"--mask-token-id is {id}, must be in [0, {size}]; {size} adds a token.")
        is_new = id == size
    else:
        vocabulary = tokenizer.get_vocab()
        last = max(vocabulary.values())
        demand(last < size, f"The tokenizer has a token {last}, the embedding only {size} rows.")
        if id is not None:
            token = next((text for text, number in vocabulary.items() if number == id), None)
            demand(token is not None, f"--mask-token-id is {id}, which is no token of the tokenizer.")
        demand(token is None or token in vocabulary, f"--mask-token is {token!r}, which is no token of the tokenizer.")
        is_text = token is not None and vocabulary[token] not in tokenizer.added_tokens_decoder
        demand(not is_text, f"--mask-token is {token!r}, a token of ordinary text: it must be one that no text has.")
        token = token or tokenizer.mask_token or MASK_TOKEN
        is_new = token not in vocabulary
        tokenizer.add_special_tokens({"mask_token": token})
        id = tokenizer.convert_tokens_to_ids(token)
        demand(not is_new or id == last + 1, f"The tokenizer gives its new token the id {id}, not {last + 1}.")
    ends = ids["eos_token_id"] if isinstance(ids["eos_token_id"], list) else [ids["eos_token_id"]]
    demand(id not in [*ends, ids["pad_token_id"]], f"Token {id} ends or pads a text: it cannot be the mask token.")
    return id, is_new


def generation_of(config: CloverConfig, ids: dict, tokenizer: PreTrainedTokenizerFast | None) -> dict:
    """What generation_config.json says of a Clover: greedy block diffusion, with the source's token ids."""
    vocabulary = tokenizer.get_vocab() if tokenizer is not None else {}
    marks = {"think_start_token_id": vocabulary.get("<think>"), "think_end_token_id": vocabulary.get("</think>")}
    generation = CloverGenerationConfig(
        decoding="low_confidence", block_size=config.block_size, threshold=0.95, do_sample=False, **marks, **ids
    )
    return json.loads(generation.to_json_string())


def added_tensors(
    clover: CloverForDiffusionLM, stock: PreTrainedModel, stored: dict[str, Stored]
) -> dict[str, dict[str, torch.Tensor]]:
    """What stock lacks in each Gated DeltaNet layer, as the model initialises it; by the layer's convolution."""
    known, added = {*stock.state_dict()}, {}
    for place, layer in clover.named_modules():
        if isinstance(layer, CloverGatedDeltaNet):
            convolution = f"{place}.conv1d.weight"
            new = [name for name, _ in layer.named_parameters() if f"{place}.{name}" not in known]
            for name in new:
                in_fp32 = name in clover._keep_in_fp32_modules_strict
                dtype = torch.float32 if in_fp32 else stored[convolution].dtype
                shape = layer.get_parameter(name).shape
                setattr(layer, name, nn.Parameter(torch.empty(shape, dtype=dtype, device="cpu")))
            clover._init_weights(layer)  # all other tensors of the layer are on meta: nothing happens to them
            added[convolution] = {f"{place}.{name}": layer.get_parameter(name).data for name in new}
    return added


def rows_before(tensors: dict[str, Planned]) -> str:
    """What is in the source where the plan sets a row: a safetensors file in base64, names and (H,)."""
    set_rows = {name: p for name, p in tensors.items() if p.row and p.row[0] < p.origin.shape[0]}
    held = {name: rows_of(p.origin, p.row[0], p.row[0] + 1)[0] for name, p in set_rows.items()}
    return base64.b64encode(safetensors.torch.save(held)).decode()


# ---- both models, run --------------------------------------------------------------------------------------


def compare_logits(source: Source, target: Path, result: Result, reverse: bool) -> None:
    """Raises a `ValueError` unless both models' causal logits are equal bit by bit, but for a row that was set."""
    classes = [(Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig), (CloverForDiffusionLM, CloverConfig)]
    (first, config_class), (second, _) = reversed(classes) if reverse else classes
    size = min(result.vocabulary)
    planned = result.tensors[TABLES[0]]
    kept = torch.ones(size, dtype=torch.bool)
    kept[[planned.row[0]] if planned.row and planned.row[0] < size else []] = False
    generator = torch.Generator().manual_seed(0)
    ids = kept.nonzero()[:, 0][torch.randint(0, int(kept.sum()), (2, 80), generator=generator)]
    before = logits_of(first, source.folder, config_class(**source.fields), planned.dtype, ids, size)[..., kept]
    after = logits_of(second, target, None, planned.dtype, ids, size)[..., kept]
    demand(before.isfinite().all(), f"{source.folder}: the causal logits are not finite.")
    worst = (before.double() - after.double()).abs().max()
    demand(torch.equal(bits(before), bits(after)), f"The causal logits differ, by {worst:.2e} at most.")


@torch.no_grad()
def logits_of(
    model_class: type[PreTrainedModel],
    folder: Path,
    config: PreTrainedConfig | None,
    dtype: torch.dtype,
    ids: torch.Tensor,
    size: int,
) -> torch.Tensor:
    """Causal logits (B, T, size) of the first `size` tokens."""
    model, found = model_class.from_pretrained(folder, config=config, dtype=dtype, output_loading_info=True)
    wrong = {*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}
    demand(not wrong, f"{folder}: {model_class.__name__} does not find {', '.join(sorted(wrong)[:5])}.")
    # One shape for both products: with another number of rows a matrix product may sum in another order.
    model.lm_head.weight = nn.Parameter(model.lm_head.weight[:size].clone())
    return model.eval()(ids, use_cache=False).logits


# ---- the command -------------------------------------------------------------------------------------------


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--from", dest="source", type=Path, required=True, help="folder of the checkpoint to convert")
    command.add_argument("--to", dest="target", type=Path, required=True, help="folder to make")
    command.add_argument("--reverse", action="store_true", help="from a Clover to an autoregressive checkpoint")
    command.add_argument("--block-size", type=int, default=Options.block_size)
    command.add_argument("--mask-token", help=f"an existing token; default: the tokenizer's, or a new {MASK_TOKEN}")
    command.add_argument("--mask-token-id", type=int, help="the same by its id")
    command.add_argument(
        "--max-shard-size", default=Options.max_shard_size, help="also bounds memory; default %(default)s"
    )
    command.add_argument(
        "--verify",
        choices=VERIFY,
        default="auto",
        help=f"tensors are always compared; logits: run both models too; auto: up to {LOGITS_UP_TO / 2**30:.0f} GiB",
    )


def run(arguments: argparse.Namespace) -> int:
    options = Options(**{name: getattr(arguments, name) for name in Options.__dataclass_fields__})
    print(convert(arguments.source, arguments.target, options, arguments.verify))
    return 0
