"""Converting checkpoints of stock Qwen3.5-MoE, saved by stock code, into Clovers and back."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from random_clover import randomise
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
)

from clover import CloverForDiffusionLM
from clover.training import __main__ as commands
from clover.training import conversion_target, convert
from clover.training.convert import Options

ROOT = Path(__file__).parents[1]
TOKENS = 260  # of the tokenizer: bytes and four marks
MARKS = ["<|endoftext|>", "<|im_end|>", "<think>", "</think>"]
EOS, PAD = 257, 256
GDN_LAYERS = (0, 1, 3)
ADDED = ("conv_right_weight", "bd_softmax_logit_scale", "bd_softmax_history_bias", "bd_softmax_history_c")
LAYOUTS = ("one tensor per expert", "fused experts", "several files", "inside a vision model")
SAMPLING = {"eos_token_id": [EOS, PAD], "pad_token_id": PAD, "do_sample": True, "temperature": 0.6, "top_k": 20}
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 2,
}


# ---- checkpoints of the stock model ----------------------------------------------------------------------------------


def text_config(vocab: int = TOKENS + 4, **changes) -> Qwen3_5MoeTextConfig:
    return Qwen3_5MoeTextConfig(vocab_size=vocab, **SIZES | changes)


def save_tokenizer(folder: Path) -> None:
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(MARKS)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="right"
    ).save_pretrained(folder)


def save_stock(folder: Path, layout: str = LAYOUTS[0], dtype: torch.dtype = torch.float32, **changes) -> Path:
    """A checkpoint as stock code saves one, with tokenizer and generation_config.json."""
    config = text_config(**changes)
    if layout == "inside a vision model":
        whole = Qwen3_5MoeConfig(
            text_config=config.to_dict(), vision_config=VISION, tie_word_embeddings=config.tie_word_embeddings
        )
        model = randomise(Qwen3_5MoeForConditionalGeneration(whole)).to(dtype)
    else:
        model = randomise(Qwen3_5MoeForCausalLM(config)).to(dtype)
    model.save_pretrained(folder, max_shard_size="40KB" if layout == "several files" else "5GB")
    if layout == "fused experts":
        kept = {name: w.contiguous() for name, w in model.state_dict().items()}
        if config.tie_word_embeddings:
            del kept["lm_head.weight"]
        assert "model.layers.0.mlp.experts.gate_up_proj" in kept
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    elif layout == "one tensor per expert":
        assert "model.layers.0.mlp.experts.3.gate_proj.weight" in weights(folder)
    elif layout == "several files":
        assert len(list(folder.glob("*.safetensors"))) > 3
    else:
        more = {"mtp.fc.weight": torch.zeros(2), "mtp.norm.weight": torch.zeros(2)}  # which stock code never saves
        save_file(weights(folder) | more, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps(SAMPLING))
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: w for path in sorted(folder.glob("*.safetensors")) for name, w in load_file(path).items()}


def as_text(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of the text model, by their names in it."""
    own = {name.replace("model.language_model.", "model."): w for name, w in stored.items()}
    return {name: w for name, w in own.items() if not name.startswith(("model.visual.", "mtp."))}


def assert_same_bits(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert some.keys() == others.keys()
    for name, tensor in some.items():
        assert tensor.dtype == others[name].dtype and tensor.shape == others[name].shape, name
        assert torch.equal(tensor.view(torch.uint8), others[name].view(torch.uint8)), name


def ids(rows: int = 2, length: int = 70) -> torch.Tensor:
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def causal(model) -> torch.Tensor:
    return model.eval()(ids()).logits


def stock_logits(folder: Path) -> torch.Tensor:
    nested = "text_config" in json.loads((folder / "config.json").read_text())
    return causal((Qwen3_5MoeForConditionalGeneration if nested else Qwen3_5MoeForCausalLM).from_pretrained(folder))


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> Path:
    """Untied, in fp32, with four rows without a token. Shared between tests: leave it as it is."""
    return save_stock(tmp_path_factory.mktemp("stock"))


@pytest.fixture
def changed(stock, tmp_path) -> Path:
    """A copy of it to change."""
    return Path(shutil.copytree(stock, tmp_path / "changed"))


@pytest.fixture(scope="module")
def converted(stock, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "clover"
    convert.convert(stock, folder)
    return folder


# ---- the model is the same -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("vocab", [TOKENS, TOKENS + 4], ids=["no free row", "free rows"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_causal_logits_of_every_layout_are_exactly_stocks(layout, vocab, tied, tmp_path):
    source = save_stock(tmp_path / "stock", layout, vocab=vocab, tie_word_embeddings=tied)
    report = convert.convert(source, tmp_path / "clover", verify="tensors")
    model, info = AutoModel.from_pretrained(tmp_path / "clover", trust_remote_code=True, output_loading_info=True)
    assert type(model).__name__ == "CloverForDiffusionLM"
    assert not any(info.values()), info
    assert report.mask_token_id == model.config.mask_token_id == TOKENS
    assert report.vocabulary == (vocab, TOKENS + 4 if vocab > TOKENS else TOKENS + 1)
    kept = [token for token in range(vocab) if token != TOKENS]
    expected = stock_logits(source)
    assert expected.std() > 0.1
    assert torch.equal(causal(model)[..., kept], expected[..., kept])

    before, after = as_text(weights(source)), weights(tmp_path / "clover")
    assert report.copied == len(before) and report.added == len(after) - len(before) == len(ADDED) * len(GDN_LAYERS)
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    assert_same_bits(
        {n: w for n, w in before.items() if n not in tables}, {n: after[n] for n in before if n not in tables}
    )
    seen = dict(report.left_out)
    if layout == "inside a vision model":
        assert seen.pop("model.visual.*") == len([n for n in weights(source) if n.startswith("model.visual.")]) > 3
        assert seen.pop("mtp.*") == 2
        assert "left out" in str(report)
    assert seen == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_added_tensors_are_those_of_a_new_clover_in_the_dtypes_that_it_keeps(dtype, tmp_path):
    source = save_stock(tmp_path / "stock", dtype=dtype)
    assert convert.convert(source, tmp_path / "clover").compared_logits
    written = weights(tmp_path / "clover")
    new = CloverForDiffusionLM(CloverForDiffusionLM.config_class.from_pretrained(tmp_path / "clover"))
    for layer in GDN_LAYERS:
        for name in ADDED:
            name = f"model.layers.{layer}.linear_attn.{name}"
            kept = torch.float32 if "bd_softmax" in name else dtype
            assert written[name].dtype == kept, name
            assert torch.equal(written[name], new.get_parameter(name).data.to(kept)), name
    assert written["model.layers.0.linear_attn.bd_softmax_logit_scale"].tolist() == pytest.approx([8**0.5] * 4)


def test_a_converted_folder_loads_and_generates_where_the_package_is_not(converted, tmp_path):
    for path in converted.iterdir():
        assert path.is_file() and not path.is_symlink(), path
        assert path.stat().st_mode & 0o044 == 0o044, f"{path} is for the owner alone"
    code = {path.name for path in ROOT.glob("*_clover.py")}
    assert code <= {path.name for path in converted.iterdir()}
    moved = shutil.copytree(converted, tmp_path / "moved")
    script = f"""
import sys, torch
from transformers import AutoModel, AutoTokenizer
model = AutoModel.from_pretrained({str(moved)!r}, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained({str(moved)!r}, trust_remote_code=True)
assert tokenizer.mask_token_id == model.config.mask_token_id == {TOKENS}
prompts = tokenizer(["one", "another"], return_tensors="pt", padding=True)
written = model.generate(**prompts, max_new_tokens=40)
assert written.shape[0] == 2 and not (written == {TOKENS}).any()
assert "clover" not in sys.modules
"""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_is_written_wrong_is_not_passed_over(stock, tmp_path, monkeypatch):
    def flipping(tensors, path, metadata):
        name = next(name for name in tensors if name.endswith("norm.weight"))
        wrong = tensors[name].clone()
        wrong.view(torch.uint8)[0] ^= 1
        save_file(tensors | {name: wrong}, path, metadata=metadata)

    monkeypatch.setattr(conversion_target, "save_file", flipping)
    with pytest.raises(ValueError, match="does not read back"):
        convert.convert(stock, tmp_path / "bits")
    monkeypatch.undo()

    def also_breaking(target, result):
        conversion_target.write_rest(target, result)
        stored = load_file(target / "model.safetensors")
        stored["model.norm.weight"] = stored["model.norm.weight"] * 1.001
        save_file(stored, target / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(convert, "write_rest", also_breaking)
    with pytest.raises(ValueError, match="causal logits differ"):
        convert.convert(stock, tmp_path / "logits")


# ---- the mask token --------------------------------------------------------------------------------------------------


def test_a_new_mask_token_gets_a_free_row_and_the_mean_of_the_tokens(stock, converted):
    before, after = weights(stock), weights(converted)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert after[name].shape == before[name].shape
        torch.testing.assert_close(after[name][TOKENS], before[name][:TOKENS].mean(0))
        others = [row for row in range(TOKENS + 4) if row != TOKENS]
        assert torch.equal(after[name][others], before[name][others])


def test_a_new_mask_token_is_never_more_probable_than_a_token_drawn_blindly(converted):
    probabilities = causal(AutoModel.from_pretrained(converted, trust_remote_code=True))[..., : TOKENS + 1].softmax(-1)
    assert probabilities[..., TOKENS].max() < 1 / TOKENS


def test_a_table_without_a_free_row_grows_by_one(tmp_path):
    source = save_stock(tmp_path / "stock", vocab=TOKENS)
    convert.convert(source, tmp_path / "clover")
    before, after = weights(source), weights(tmp_path / "clover")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert len(after[name]) == TOKENS + 1
        assert torch.equal(after[name][:TOKENS], before[name])
        torch.testing.assert_close(after[name][TOKENS], before[name].mean(0))


def test_the_tokenizer_gets_the_mask_token_and_splits_as_before(stock, converted):
    before = PreTrainedTokenizerFast.from_pretrained(stock)
    after = AutoTokenizer.from_pretrained(converted, trust_remote_code=True)
    assert after.get_vocab() == before.get_vocab() | {"<|mask|>": TOKENS}
    text = "Don't  stop: ünïcödé 12345<think>\n\n</think><|im_end|>"
    assert after(text).input_ids == before(text).input_ids
    assert after("a<|mask|>b").input_ids[1] == after.mask_token_id == TOKENS
    assert (after.eos_token, after.pad_token, after.padding_side) == ("<|im_end|>", "<|endoftext|>", "left")


@pytest.mark.parametrize("options", [Options(mask_token="</think>"), Options(mask_token_id=259)], ids=["text", "id"])
def test_an_existing_token_can_be_the_mask_and_keeps_its_rows(options, stock, tmp_path):
    report = convert.convert(stock, tmp_path / "clover", options)
    assert report.mask_token_id == 259
    assert AutoTokenizer.from_pretrained(tmp_path / "clover", trust_remote_code=True).mask_token == "</think>"
    after = weights(tmp_path / "clover")
    assert_same_bits(weights(stock), {name: after[name] for name in weights(stock)})


def test_the_tokenizers_own_mask_token_is_used(changed, tmp_path):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(changed)
    tokenizer.add_special_tokens({"mask_token": "<hole>"})
    tokenizer.save_pretrained(changed)
    assert convert.convert(changed, tmp_path / "clover").mask_token_id == TOKENS
    after = weights(tmp_path / "clover")
    assert_same_bits(weights(changed), {name: after[name] for name in weights(changed)})


@pytest.mark.parametrize("id", [7, TOKENS + 4])
def test_without_a_tokenizer_the_mask_is_an_id_and_the_next_free_one_adds_a_row(id, changed, tmp_path):
    for path in changed.glob("tokenizer*"):
        path.unlink()
    report = convert.convert(changed, tmp_path / "clover", Options(mask_token_id=id))
    assert report.mask_token_id == id
    assert report.vocabulary == (TOKENS + 4, max(TOKENS + 4, id + 1))
    assert AutoModel.from_pretrained(tmp_path / "clover", trust_remote_code=True).config.mask_token_id == id


# ---- the configs -----------------------------------------------------------------------------------------------------


def test_the_configs_describe_block_diffusion_with_the_sources_tokens(stock, tmp_path):
    report = convert.convert(stock, tmp_path / "clover", Options(block_size=16))
    config = json.loads((tmp_path / "clover" / "config.json").read_text())
    assert config["model_type"] == "clover_moe" and config["architectures"] == ["CloverForDiffusionLM"]
    assert config["auto_map"] == json.loads((ROOT / "config.json").read_text())["auto_map"]
    assert (config["block_size"], config["mask_token_id"], config["pad_token_id"]) == (16, TOKENS, PAD)
    generation = AutoModelForCausalLM.from_pretrained(tmp_path / "clover", trust_remote_code=True).generation_config
    assert (generation.decoding, generation.block_size, generation.do_sample) == ("low_confidence", 16, False)
    assert (generation.eos_token_id, generation.pad_token_id) == ([EOS, PAD], PAD)
    assert (generation.think_start_token_id, generation.think_end_token_id) == (258, 259)
    assert generation.temperature is None
    assert "do_sample, temperature, top_k" in str(report), "what is not carried over is told"


def test_an_end_and_a_padding_that_no_config_names_are_the_tokenizers(tmp_path):
    source = save_stock(tmp_path / "stock", eos_token_id=None, pad_token_id=None)
    (source / "generation_config.json").unlink()
    report = convert.convert(source, tmp_path / "clover")
    model = AutoModel.from_pretrained(tmp_path / "clover", trust_remote_code=True)
    assert (model.config.pad_token_id, model.generation_config.eos_token_id) == (PAD, EOS)
    assert "pad_token_id is the tokenizer's, 256" in str(report)
    convert.convert(tmp_path / "clover", tmp_path / "back", Options(reverse=True))
    assert json.loads((tmp_path / "back" / "config.json").read_text()).get("pad_token_id") is None


# ---- memory ----------------------------------------------------------------------------------------------------------

MEASURED = """
import re, sys
from pathlib import Path
from clover.training.convert import Options, convert

def peak():  # not getrusage's, which a process inherits from the one that started it
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

work = Path(sys.argv[1])
convert(work / "small", work / "first", Options(max_shard_size="10MB"), verify="tensors")  # imports and warms up
before = peak()
convert(work / "large", work / "second", Options(max_shard_size="10MB"), verify="tensors")
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from Linux's /proc")
@pytest.mark.parametrize("layout", ["one tensor per expert", "fused experts"])
def test_memory_is_bounded_by_a_shard_and_not_by_the_checkpoint(layout, stock, tmp_path):
    (tmp_path / "small").symlink_to(stock)
    large = save_stock(
        tmp_path / "large",
        layout,
        dtype=torch.bfloat16,
        hidden_size=256,
        num_experts=32,
        moe_intermediate_size=512,
        num_hidden_layers=8,
        layer_types=SIZES["layer_types"] * 2,
    )
    size = (large / "model.safetensors").stat().st_size
    assert size > 200e6
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path)], cwd=ROOT.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    grown = int(done.stdout.splitlines()[-1])
    largest = max(path.stat().st_size for path in (tmp_path / "second").glob("*.safetensors"))
    # A shard's pages of the source and of the new file are mapped; beyond these there is nothing.
    assert 0 < grown < 2 * largest + 16e6 < size / 3, f"{grown:,} of {size:,} bytes, {largest:,} in the largest shard"


# ---- interrupted, and gone on with -----------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from clover.training import conversion_target, convert
save, done = conversion_target.save_file, []

def save_some(tensors, path, metadata):
    if len(done) == 3:
        Path(path).write_bytes(b"half a shard")
        os.kill(os.getpid(), signal.SIGKILL)
    save(tensors, path, metadata=metadata)
    done.append(path)

conversion_target.save_file = save_some
convert.convert(Path(sys.argv[1]), Path(sys.argv[2]), convert.Options(max_shard_size="40KB"))
"""


@pytest.fixture(scope="module")
def killed(stock, tmp_path_factory) -> Path:
    """A conversion killed while it wrote its fourth shard. Copy it before going on."""
    folder = tmp_path_factory.mktemp("killed") / "clover"
    command = [sys.executable, "-c", KILLED, str(stock), str(folder)]
    assert subprocess.run(command, cwd=ROOT.parent, capture_output=True).returncode == -9
    assert len(list(folder.glob("*.safetensors"))) == 3 and len(list(folder.glob("*.new"))) == 1
    return folder


SMALL_SHARDS = Options(max_shard_size="40KB")


def test_a_killed_conversion_goes_on_where_it_stopped(stock, killed, tmp_path):
    folder = Path(shutil.copytree(killed, tmp_path / "clover"))
    assert not (folder / "config.json").exists(), "half a checkpoint must not load"
    kept = {path: path.stat().st_ino for path in folder.glob("*.safetensors")}
    report = convert.convert(stock, folder, SMALL_SHARDS)
    whole = convert.convert(stock, tmp_path / "whole", SMALL_SHARDS)
    assert (report.found, whole.found) == (3, 0)
    assert report.written + 3 == whole.written > 5
    assert all(path.stat().st_ino == inode for path, inode in kept.items()), "a finished shard was written again"
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert not [name for name in names if "partial" in name or name.endswith(".new")]
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_a_finished_shard_that_was_damaged_since_is_written_again(stock, killed, tmp_path):
    folder = Path(shutil.copytree(killed, tmp_path / "clover"))
    first, second, _ = sorted(folder.glob("*.safetensors"))
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)
    second.write_bytes(second.read_bytes()[:-5])
    assert convert.convert(stock, folder, SMALL_SHARDS).found == 1


def test_a_half_done_conversion_is_not_gone_on_with_from_elsewhere(stock, killed, changed, tmp_path):
    folder = Path(shutil.copytree(killed, tmp_path / "clover"))
    with pytest.raises(ValueError, match="other options"):
        convert.convert(stock, folder, Options(max_shard_size="40KB", block_size=8))
    stored = load_file(changed / "model.safetensors")
    save_file({name: w.bfloat16() for name, w in stored.items()}, changed / "model.safetensors")
    with pytest.raises(ValueError, match="another source"):
        convert.convert(changed, folder, SMALL_SHARDS)
    assert convert.convert(stock, folder, SMALL_SHARDS).found == 3


def test_a_finished_conversion_is_not_written_over(stock, converted):
    before = {path.name: path.stat().st_mtime_ns for path in converted.iterdir()}
    with pytest.raises(ValueError, match="exists and is no half-done conversion"):
        convert.convert(stock, converted)
    assert before == {path.name: path.stat().st_mtime_ns for path in converted.iterdir()}


# ---- what is refused, before anything is written ---------------------------------------------------------------------


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, drop: str | None = None, **more) -> None:
    stored = load_file(folder / "model.safetensors")
    stored.pop(drop, None)
    save_file(stored | more, folder / "model.safetensors", metadata={"format": "pt"})


def pickle_alone(folder):
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def cut_short(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def two_files(folder, **weight_map):
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(stored, folder / "a.safetensors")
    index = {"weight_map": dict.fromkeys(stored, "a.safetensors") | weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def one_in_two_files(folder):
    save_file({"lm_head.weight": torch.zeros(264, 32)}, folder / "b.safetensors")
    two_files(folder, **{"model.norm.weight": "b.safetensors"})


def more_words(folder):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens([f"<{i}>" for i in range(5)])
    tokenizer.save_pretrained(folder)


GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"
REFUSED = {
    "pickle": (pickle_alone, Options(), "pytorch_model.bin.*pickle"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), Options(), "neither model.safetensors nor"),
    "a file cut short": (cut_short, Options(), "model.safetensors cannot be read"),
    "an index of absent files": (lambda f: two_files(f, x="gone.safetensors"), Options(), "gone.safetensors"),
    "an index that leaves its folder": (lambda f: two_files(f, x="../a.safetensors"), Options(), r"\.\./a.safetensors"),
    "an index of absent tensors": (lambda f: two_files(f, x="a.safetensors"), Options(), "disagree about x"),
    "a tensor in two files": (one_in_two_files, Options(), "lm_head.weight is in b.safetensors and in another"),
    "an unknown tensor": (
        lambda f: edit_weights(f, **{"model.layers.9.x": torch.zeros(2)}),
        Options(),
        "model.layers.9.x is unknown",
    ),
    "a missing tensor": (
        lambda f: edit_weights(f, drop="model.norm.weight"),
        Options(),
        "model.norm.weight is missing",
    ),
    "a missing expert": (lambda f: edit_weights(f, drop=GATE), Options(), GATE + " is missing"),
    "experts that are fused as well": (
        lambda f: edit_weights(f, **{"model.layers.1.mlp.experts.gate_up_proj": torch.zeros(4, 32, 32)}),
        Options(),
        "experts.0.gate_proj.weight is unknown",
    ),
    "another shape": (
        lambda f: edit_config(f, vocab_size=999),
        Options(),
        r"lm_head.weight is \(264, 32\), but config.json makes it \(999, 32\)",
    ),
    "a head of tied weights": (
        lambda f: edit_config(f, tie_word_embeddings=True),
        Options(),
        "lm_head.weight is unknown",
    ),
    "whole numbers": (
        lambda f: edit_weights(f, **{"model.norm.weight": torch.zeros(32, dtype=torch.int8)}),
        Options(),
        "model.norm.weight is I8",
    ),
    "another model": (lambda f: edit_config(f, model_type="qwen3_moe"), Options(), "model_type is 'qwen3_moe'"),
    "a Clover": (lambda f: edit_config(f, model_type="clover_moe"), Options(), "is a Clover already"),
    "backwards from stock": (lambda f: None, Options(reverse=True), "model_type is 'qwen3_5_moe_text', must be clover"),
    "a wrong field": (lambda f: edit_config(f, num_experts="four"), Options(), "num_experts"),
    "a block of nothing": (lambda f: None, Options(block_size=0), "block_size"),
    "a config that is no JSON": (lambda f: (f / "config.json").write_text("{"), Options(), "config.json is no JSON"),
    "no tokenizer": (lambda f: [p.unlink() for p in f.glob("tokenizer*")], Options(), "--mask-token-id must say"),
    "no tokenizer.json": (lambda f: (f / "tokenizer.json").unlink(), Options(), "no tokenizer.json"),
    "more words than rows": (more_words, Options(), "token 264, the embedding only 264"),
    "an unknown mask token": (lambda f: None, Options(mask_token="<|msk|>"), r"<\|msk\|>' *, which is no token"),
    "an unknown mask id": (lambda f: None, Options(mask_token_id=262), "262, which is no token"),
    "two mask tokens": (lambda f: None, Options(mask_token="a", mask_token_id=2), "give one"),
    "a mask of ordinary text": (lambda f: None, Options(mask_token="a"), "a token of ordinary text"),
    "a mask of ordinary text, by id": (lambda f: None, Options(mask_token_id=5), "a token of ordinary text"),
    "a size that is none": (lambda f: None, Options(max_shard_size="abc"), "--max-shard-size is 'abc'"),
    "options of the other way": (lambda f: None, Options(reverse=True, mask_token="a"), "no option of --reverse"),
    "a mask that ends": (lambda f: None, Options(mask_token="<|im_end|>"), "257 ends or pads"),
    "a size without a unit": (lambda f: None, Options(max_shard_size="5"), "--max-shard-size is .5."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_named_before_anything_is_written(case, changed, tmp_path):
    spoil, options, message = REFUSED[case]
    spoil(changed)
    with pytest.raises(ValueError, match=message):
        convert.convert(changed, tmp_path / "clover", options)
    assert not (tmp_path / "clover").exists()


def test_a_full_disk_is_told_before_anything_is_written(stock, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(ValueError, match="has 1,000 free"):
        convert.convert(stock, tmp_path / "clover")
    assert not (tmp_path / "clover").exists()


def test_a_licence_is_not_carried_over_and_that_is_said(changed, tmp_path):
    (changed / "LICENSE").write_text("Apache")
    assert "not carried over: LICENSE" in convert.convert(changed, tmp_path / "clover", verify="tensors").notes


def test_the_command_reports_or_says_what_is_wrong(stock, tmp_path, capsys, monkeypatch):
    command = ["convert", "--from", str(stock), "--to", str(tmp_path / "clover"), "--verify", "tensors"]
    monkeypatch.setattr(sys, "argv", ["training", *command])
    assert commands.status_of(commands.run) == 0
    shown = capsys.readouterr().out
    assert "12 added" in shown and "264 before, 264 after; mask token 260" in shown and "NOT compared" in shown
    assert commands.status_of(commands.run) == 2
    assert "exists and is no half-done conversion" in capsys.readouterr().err


# ---- and back --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [TOKENS, TOKENS + 4], ids=["grown", "free rows"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_way_back_gives_every_bit_of_the_source(layout, vocab, tmp_path):
    source = save_stock(tmp_path / "stock", layout, torch.bfloat16, vocab=vocab)
    convert.convert(source, tmp_path / "clover")
    report = convert.convert(tmp_path / "clover", tmp_path / "back", Options(reverse=True))
    assert report.compared_logits and report.left_out == {"of a Clover's own tensors": 12}
    assert_same_bits(weights(tmp_path / "back"), as_text(weights(source)))
    model, info = Qwen3_5MoeForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(causal(model), stock_logits(source))

    ignored = {"transformers_version": None, "architectures": None, "_name_or_path": None}
    config = Qwen3_5MoeTextConfig.from_pretrained(tmp_path / "back").to_dict() | ignored
    expected = text_config(vocab=vocab, dtype="bfloat16").to_dict() | ignored
    assert config == expected
    assert GenerationConfig.from_pretrained(tmp_path / "back") == GenerationConfig.from_pretrained(source)
    words = [PreTrainedTokenizerFast.from_pretrained(folder) for folder in (source, tmp_path / "back")]
    assert words[0].get_vocab() == words[1].get_vocab() and words[1].mask_token is None
    assert not list((tmp_path / "back").glob("*_clover.py"))


def test_a_clover_that_was_trained_and_saved_on_goes_back_with_its_vocabulary(converted, tmp_path):
    model = CloverForDiffusionLM.from_pretrained(converted)
    randomise(model, seed=5).save_pretrained(tmp_path / "trained")
    report = convert.convert(tmp_path / "trained", tmp_path / "back", Options(reverse=True))
    assert report.vocabulary == (TOKENS + 4, TOKENS + 4) and "conversion.json is not there" in str(report)
    assert torch.equal(stock_logits(tmp_path / "back"), causal(model))


def test_a_record_of_another_checkpoint_is_refused(converted, tmp_path):
    folder = Path(shutil.copytree(converted, tmp_path / "clover"))
    edit_config(folder, mask_token_id=3)
    with pytest.raises(ValueError, match="conversion.json is not of this checkpoint"):
        convert.convert(folder, tmp_path / "back", Options(reverse=True))
    assert not (tmp_path / "back").exists()


def test_the_small_checkpoint_goes_back_and_comes_again_with_its_added_tensors_new(tmp_path):
    small = ROOT / "checkpoints" / "clover-tiny"
    convert.convert(small, tmp_path / "stock", Options(reverse=True))
    convert.convert(tmp_path / "stock", tmp_path / "clover")
    before, after = weights(small), weights(tmp_path / "clover")
    own = {name for name in before if name.rpartition(".")[2] in ADDED}
    assert before.keys() == after.keys() and len(own) == 16
    assert_same_bits({n: w for n, w in before.items() if n not in own}, {n: after[n] for n in before if n not in own})
    tokenizers = [AutoTokenizer.from_pretrained(f, trust_remote_code=True) for f in (small, tmp_path / "clover")]
    assert tokenizers[0].backend_tokenizer.to_str() == tokenizers[1].backend_tokenizer.to_str()
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
