"""The root as a Hub repository and as the package `clover`: its metadata, its configuration, what an import does."""

import ast
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
)

import clover
from clover import CloverConfig, CloverForDiffusionLM, CloverGenerationConfig

ROOT = Path(__file__).parents[1]
CODE = tuple(sorted(path.name for path in ROOT.glob("*_clover.py")))
IDS = torch.arange(1, 9)[None]


def small_config(**changes) -> CloverConfig:
    """Both kinds of layer, as small as they come."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "mask_token_id": 63,
    }
    return CloverConfig(**sizes | changes)


@pytest.fixture(scope="module")
def model() -> CloverForDiffusionLM:
    torch.manual_seed(0)
    return CloverForDiffusionLM(small_config()).eval()


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    return folder


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


# ---- the 35B's metadata ----------------------------------------------------------------------------------------------


def test_the_release_is_a_clover_with_blocks_of_32_positions():
    config = AutoConfig.from_pretrained(ROOT, trust_remote_code=True)
    assert config.model_type == "clover_moe"
    assert config.block_size == 32
    assert config.mask_token_id is None
    assert config.max_position_embeddings == 131072
    assert config.dtype == torch.bfloat16
    assert config.rope_parameters == {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
    }


def test_the_35b_is_the_stock_model_plus_four_tensors_per_gated_deltanet_layer():
    # The stock configuration's own defaults are the sizes of the 35B.
    release, stock_config = CloverConfig.from_pretrained(ROOT), Qwen3_5MoeTextConfig()
    with torch.device("meta"):
        ours = dict(CloverForDiffusionLM(release).named_parameters())
        stock = dict(Qwen3_5MoeForCausalLM(stock_config).named_parameters())
    assert round(sum(p.numel() for p in stock.values()) / 1e9, 2) == 34.66
    assert {name: ours[name].shape for name in stock} == {name: p.shape for name, p in stock.items()}
    added = [p.numel() for name, p in ours.items() if name not in stock]
    assert len(added) == 30 * 4
    assert sum(added) == 30 * (8192 * 3 + 3 * 32)


def test_the_releases_files_agree_on_the_tokens_that_end_and_pad():
    config, generation, tokens = (
        json.loads((ROOT / name).read_text())
        for name in ("config.json", "generation_config.json", "tokenizer_config.json")
    )
    ids = {token["content"]: int(id) for id, token in tokens["added_tokens_decoder"].items()}
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    assert config["eos_token_id"] == generation["eos_token_id"] == ends == [248046, 248044]
    assert tokens["eos_token"] == "<|im_end|>"
    assert generation["pad_token_id"] == ids[tokens["pad_token"]] == 248044
    assert tokens["model_max_length"] == config["max_position_embeddings"]
    assert generation["block_size"] == config["block_size"]
    assert sorted(ids.values()) == list(range(248044, 248077)), "the text's vocabulary ends at 248043"


def test_answers_keep_their_markup_when_special_tokens_are_skipped():
    tokens = json.loads((ROOT / "tokenizer_config.json").read_text())["added_tokens_decoder"].values()
    special = {token["content"] for token in tokens if token["special"]}
    assert {"<|im_start|>", "<|im_end|>", "<|endoftext|>"} <= special
    assert not special & {"<think>", "</think>", "<tool_call>", "</tool_call>"}


@pytest.mark.parametrize("kind", [GenerationConfig, CloverGenerationConfig])
def test_the_generation_config_loads_and_saves_without_complaint(kind, tmp_path):
    config = kind.from_pretrained(ROOT)
    config.save_pretrained(tmp_path)
    again = kind.from_pretrained(tmp_path)
    for loaded in (config, again):
        assert (loaded.decoding, loaded.block_size, loaded.threshold) == ("low_confidence", 32, 0.95)
        assert loaded.do_sample is False, "left out, pipelines would sample"
        assert loaded.max_new_tokens is None, "a budget here would silently cap every answer"


def test_the_tokenizer_keeps_the_pre_tokenizer_of_its_own_file(tmp_path):
    # Qwen2Tokenizer would put its own regular expression, without marks, in this one's place.
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\p{L}\p{M}]+"), behavior="isolated")
    own.save(str(tmp_path / "tokenizer.json"))
    for name in ("config.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / name, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert str(tokenizer.backend_tokenizer.pre_tokenizer) == str(own.pre_tokenizer)
    assert tokenizer.padding_side == "left"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.chat_template == (ROOT / "chat_template.jinja").read_text()


# ---- the chat template -----------------------------------------------------------------------------------------------

QUESTION = {"role": "user", "content": "Is it raining?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Oslo", "days": [1, 2]}}}


def render(messages: list[dict], **options) -> str:
    template = (ROOT / "chat_template.jinja").read_text()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=template)
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def test_a_turn_opens_with_a_thought_unless_thinking_is_off():
    turn = "<|im_start|>user\nIs it raining?<|im_end|>\n"
    assert render([QUESTION]) == turn
    assert render([QUESTION], add_generation_prompt=True) == turn + "<|im_start|>assistant\n<think>\n"
    closed = render([QUESTION], add_generation_prompt=True, enable_thinking=False)
    assert closed == turn + "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_a_tool_call_and_its_results_are_rendered_between_their_markers():
    results = [{"role": "tool", "content": "rain"}, {"role": "tool", "content": "sun"}]
    call = {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [CALL]}
    text = render([{"role": "system", "content": "Be brief."}, QUESTION, call, *results], tools=[TOOL])
    system, rest = text.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\n# Tools\n")
    assert "<tools>\n" + json.dumps(TOOL) + "\n</tools>" in system
    assert system.endswith("</IMPORTANT>\n\nBe brief.")
    assert rest == (
        "<|im_start|>user\nIs it raining?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nI look.\n</think>\n\n"
        "<tool_call>\n<function=weather>\n<parameter=place>\nOslo\n</parameter>\n"
        "<parameter=days>\n[1, 2]\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n"
        "<tool_response>\nsun\n</tool_response><|im_end|>\n"
    )


@pytest.mark.parametrize(
    "answer", [{"content": "<think>\nClouds.\n</think>\n\nYes."}, {"content": "Yes.", "reasoning_content": "Clouds."}]
)
def test_old_reasoning_is_dropped_unless_it_is_to_be_preserved(answer):
    messages = [QUESTION, {"role": "assistant", **answer}, {"role": "user", "content": "Still?"}]
    assert "<|im_start|>assistant\nYes.<|im_end|>" in render(messages)
    kept = "<|im_start|>assistant\n<think>\nClouds.\n</think>\n\nYes.<|im_end|>"
    assert kept in render(messages, preserve_thinking=True)
    assert kept in render(messages[:2]), "the answer to the last question keeps its reasoning"


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "no messages|at least one message"),
        ([{"role": "system", "content": "Be brief."}], "role user"),
        ([QUESTION, {"role": "system", "content": "Be brief."}], "must come first"),
        ([QUESTION, {"role": "critic", "content": "No."}], "a role other than"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "text only"),
        ([QUESTION, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{}"}]}], "must be a mapping"),
    ],
)
def test_a_conversation_that_cannot_be_rendered_is_refused_with_its_reason(messages, complaint):
    with pytest.raises(Exception, match=complaint):
        render(messages)


# ---- the configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("block_size", 0, "at least 1"),
        ("block_size", "32", "int"),
        ("block_size", True, "int"),
        ("mask_token_id", 64, r"[0, 64)"),
        ("mask_token_id", -1, r"[0, 64)"),
        ("expert_coreset_top_p", 1.5, "(0, 1]"),
        ("expert_coreset_top_p", 0.0, "(0, 1]"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_by_field_value_and_what_is(field, value, allowed):
    with pytest.raises(Exception) as error:
        small_config(**{field: value})
    message = str(error.value)
    assert field in message
    assert repr(value) in message
    assert allowed in message


def test_mask_id_is_another_name_for_mask_token_id(tmp_path):
    config = small_config(mask_token_id=None, mask_id=7)
    assert config.mask_token_id == config.mask_id == 7
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["mask_token_id"] == 7
    assert "mask_id" not in written


def test_two_different_mask_tokens_are_refused():
    assert small_config(mask_token_id=7, mask_id=7).mask_token_id == 7
    with pytest.raises(ValueError, match="`mask_id` is 8.*`mask_token_id`.*7"):
        small_config(mask_token_id=7, mask_id=8)


def test_a_configuration_is_the_same_after_saving_and_loading(tmp_path):
    config = small_config(block_size=16, expert_coreset_top_p=0.9, eos_token_id=[1, 2])
    config.save_pretrained(tmp_path)
    # What saving adds is where the code is; it is written into the configuration that is saved, too.
    assert AutoConfig.from_pretrained(tmp_path).to_diff_dict() == config.to_diff_dict()


# ---- the code: installed, or beside a checkpoint ---------------------------------------------------------------------


def test_the_files_that_travel_stay_small():
    lines = {name: len((ROOT / name).read_text().splitlines()) for name in CODE}
    assert sum(lines[f"{name}_clover.py"] for name in ("configuration", "modeling", "generation")) < 1500
    assert max(lines.values()) < 800


def test_the_files_that_travel_need_nothing_but_torch_and_transformers():
    allowed = sys.stdlib_module_names | {"torch", "transformers", "huggingface_hub"}  # transformers needs the last
    for name in CODE:
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level < 2 and node.module, "transformers copies siblings only, and only `from .x import y`"
                modules = [] if node.level else [node.module]
            else:
                continue
            assert {module.partition(".")[0] for module in modules} <= allowed, name


def test_every_direct_dependency_but_transformers_is_pinned():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lists = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    needed = {re.split(r"[<>=!~ \[]", line)[0] for text in lists for line in text.split("\n") if line}
    pinned = set(re.findall(r"^(\S+)==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert needed - {"transformers"} <= pinned


def test_the_package_is_imported_once_under_its_own_name():
    root_modules = [
        name for name, module in sys.modules.items() if getattr(module, "__file__", None) == clover.__file__
    ]
    assert Path(clover.__file__) == ROOT / "__init__.py"
    assert root_modules == ["clover"]


@pytest.mark.parametrize("auto_map", ["kept", "removed"])
@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForCausalLM])
def test_an_installed_clover_loads_the_vendors_architecture_name_without_trust(
    auto_class, auto_map, model, checkpoint, tmp_path
):
    shutil.copy(checkpoint / "model.safetensors", tmp_path)
    config = json.loads((checkpoint / "config.json").read_text()) | {"architectures": ["CloverMoeModelLM"]}
    if auto_map == "removed":
        del config["auto_map"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = auto_class.from_pretrained(tmp_path)
    assert type(loaded) is CloverForDiffusionLM
    assert torch.equal(logits(loaded), logits(model))


def test_a_saved_checkpoint_carries_its_code(checkpoint):
    for name in CODE:
        assert (checkpoint / name).read_text() == (ROOT / name).read_text()
    auto_map = json.loads((checkpoint / "config.json").read_text())["auto_map"]
    assert auto_map["AutoConfig"] == "configuration_clover.CloverConfig"
    assert auto_map["AutoModelForCausalLM"] == "modeling_clover.CloverForDiffusionLM"


FRESH_PROCESS = """
import json, socket, sys

attempts = []

class NoSocket(socket.socket):
    def __init__(self, *arguments, **options):
        attempts.append(repr(arguments))
        raise OSError("this process must do without a network")

def no_address(*arguments, **options):
    attempts.append(repr(arguments))
    raise OSError("this process must do without a network")

socket.socket, socket.getaddrinfo = NoSocket, no_address

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

checkpoint, saved, ids = sys.argv[1], sys.argv[2], torch.tensor(json.loads(sys.argv[3]))
config = AutoConfig.from_pretrained(".", trust_remote_code=True)
facts = {"block_size": config.block_size, "models": []}
for auto_class in (AutoModel, AutoModelForCausalLM):
    model = auto_class.from_pretrained(checkpoint, trust_remote_code=True)
    with torch.no_grad():
        facts["models"].append([type(model).__name__, model(ids).logits.tolist()])
model.save_pretrained(saved)
facts["remote code alone"] = "clover" not in sys.modules
import clover
facts["attempts"] = attempts
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def fresh_process(checkpoint, tmp_path_factory) -> dict:
    """What a process that has not imported `clover` sees; `saved` is what it saved."""
    work = tmp_path_factory.mktemp("fresh")
    released = work / "released"
    shutil.copytree(checkpoint, released)
    config = json.loads((released / "config.json").read_text())
    config["auto_map"] = json.loads((ROOT / "config.json").read_text())["auto_map"]
    (released / "config.json").write_text(json.dumps(config))
    environment = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    environment["HF_MODULES_CACHE"] = str(work / "modules")
    run = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, released, work / "saved", json.dumps(IDS.tolist())],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1]) | {"saved": work / "saved"}


def test_neither_importing_nor_loading_from_a_folder_opens_a_socket(fresh_process):
    assert fresh_process["attempts"] == []


def test_the_root_loads_as_a_repository_of_remote_code(fresh_process):
    assert fresh_process["remote code alone"]
    assert fresh_process["block_size"] == 32


def test_remote_code_beside_a_checkpoint_is_the_same_model_under_both_auto_classes(fresh_process, model):
    for name, values in fresh_process["models"]:
        assert name == "CloverForDiffusionLM"
        assert torch.equal(torch.tensor(values), logits(model))


def test_a_checkpoint_saved_by_remote_code_keeps_its_code_and_both_auto_classes(fresh_process):
    assert all((fresh_process["saved"] / name).is_file() for name in CODE)
    written = json.loads((fresh_process["saved"] / "config.json").read_text())
    assert written["auto_map"] == json.loads((ROOT / "config.json").read_text())["auto_map"]
