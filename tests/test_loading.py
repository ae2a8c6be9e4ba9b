"""Loading and saving: Qwen3.5-MoE checkpoints as Clovers, by class, and by remote code in fresh processes."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from random_clover import ADDED, CODE, ROOT, filled_cache, tokens
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from clover import CloverForDiffusionLM

IDS, BLOCK = tokens(2, 20), tokens(2, 8, seed=1)
LAYOUTS = ("one tensor per expert", "fused experts", "several files", "inside a vision model")
GDN_LAYERS = (0, 2)
ADDED_KEYS = {f"model.layers.{i}.linear_attn.{name}" for i in GDN_LAYERS for name in ADDED}


def causal(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def denoising(model) -> torch.Tensor:
    cache = filled_cache(model, IDS)
    with torch.no_grad():
        return model(BLOCK, is_causal=False, past_key_values=cache).logits


# ---- checkpoints of Qwen3.5-MoE ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stock_checkpoints(stock_model, tmp_path_factory) -> dict[str, Path]:
    """The stock model's weights in every layout that there is, with the stock configuration."""
    folders = {layout: tmp_path_factory.mktemp(layout.replace(" ", "-")) for layout in LAYOUTS}
    each, fused, several, inside = folders.values()
    stock_model.save_pretrained(each)
    stock_model.save_pretrained(several, max_shard_size="60KB")
    assert len(list(several.glob("*.safetensors"))) > 3
    on_disk = load_file(each / "model.safetensors")
    assert "model.layers.0.mlp.experts.7.gate_proj.weight" in on_disk

    weights = {name: weight.contiguous() for name, weight in stock_model.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in weights
    save_file(weights, fused / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(each / "config.json", fused)

    nested = {name.replace("model.", "model.language_model.", 1): weight for name, weight in on_disk.items()}
    others = {"model.visual.blocks.0.norm1.weight": torch.zeros(2), "mtp.fc.weight": torch.zeros(2)}
    save_file(nested | others, inside / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((each / "config.json").read_text())
    whole = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {"model_type": "qwen3_5_moe"}}
    (inside / "config.json").write_text(json.dumps(whole))
    return folders


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_qwen3_5_moe_text_checkpoint_is_a_clover_that_lacks_only_the_added_tensors(
    layout, stock_checkpoints, stock_model
):
    model, report = CloverForDiffusionLM.from_pretrained(stock_checkpoints[layout], output_loading_info=True)
    assert set(report["missing_keys"]) == ADDED_KEYS
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert model.config.model_type == "clover_moe"
    assert torch.equal(causal(model), causal(stock_model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_added_tensors_that_a_checkpoint_lacks_start_neutral_and_in_their_precision(dtype, stock_checkpoints):
    model = CloverForDiffusionLM.from_pretrained(stock_checkpoints["fused experts"], dtype=dtype)
    for i in GDN_LAYERS:
        layer = model.model.layers[i].linear_attn
        assert layer.in_proj_qkv.weight.dtype == layer.conv_right_weight.dtype == dtype
        assert torch.equal(layer.conv_right_weight, torch.zeros(96, 3, dtype=dtype))
        assert torch.equal(layer.bd_softmax_history_bias, torch.zeros(4))
        assert torch.equal(layer.bd_softmax_history_c, torch.ones(4))
        assert torch.equal(layer.bd_softmax_logit_scale, torch.full((4,), 8**0.5))
    assert denoising(model).isfinite().all()


def test_a_converted_checkpoint_is_saved_as_a_clover(stock_checkpoints, stock_model, tmp_path):
    CloverForDiffusionLM.from_pretrained(stock_checkpoints["inside a vision model"]).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "clover_moe"
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model) is CloverForDiffusionLM
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(causal(model), causal(stock_model))


# ---- checkpoints of Clovers --------------------------------------------------------------------------------


@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForCausalLM, CloverForDiffusionLM])
def test_a_saved_clover_is_the_same_when_it_is_loaded(auto_class, repository, clover_model):
    model, report = auto_class.from_pretrained(repository, output_loading_info=True, trust_remote_code=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert type(model).__name__ == "CloverForDiffusionLM"
    assert torch.equal(causal(model), causal(clover_model))
    assert torch.equal(denoising(model), denoising(clover_model))


def test_a_saved_clover_may_lie_in_several_files(clover_model, tmp_path):
    clover_model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert torch.equal(denoising(CloverForDiffusionLM.from_pretrained(tmp_path)), denoising(clover_model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_softmax_tensors_stay_in_fp32_in_a_model_of_half(dtype, repository, clover_model, tmp_path):
    model = CloverForDiffusionLM.from_pretrained(repository, dtype=dtype)
    model.save_pretrained(tmp_path)
    for loaded in (model, CloverForDiffusionLM.from_pretrained(tmp_path)):
        for name, weight in loaded.named_parameters():
            kept = "bd_softmax" in name
            assert weight.dtype == (torch.float32 if kept else dtype), name
            assert not kept or torch.equal(weight, clover_model.get_parameter(name)), name
    assert (denoising(model) - denoising(clover_model)).abs().mean() < 0.05
    assert (causal(model) - causal(clover_model)).abs().mean() < 0.05


def test_a_clover_made_in_half_precision_has_its_softmax_tensors_in_fp32(clover_model):
    model = AutoModelForCausalLM.from_config(clover_model.config, dtype=torch.bfloat16)
    dtypes = {name: weight.dtype for name, weight in model.named_parameters() if "linear_attn" in name}
    assert {dtype for name, dtype in dtypes.items() if "bd_softmax" in name} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if "bd_softmax" not in name} == {torch.bfloat16}


def test_a_clover_denoises_with_layers_that_lie_on_disk(repository, clover_model, tmp_path):
    places = dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"], "cpu")
    places |= {f"model.layers.{i}": "disk" if i < 2 else "cpu" for i in range(4)}
    model = CloverForDiffusionLM.from_pretrained(repository, device_map=places, offload_folder=tmp_path)
    assert model.model.layers[0].linear_attn.conv1d.weight.is_meta
    assert (denoising(model) - denoising(clover_model)).abs().max() < 1e-5


def test_a_layer_is_never_split_between_devices(repository, clover_model, tmp_path):
    size = sum(weight.numel() * weight.element_size() for weight in clover_model.parameters())
    model = CloverForDiffusionLM.from_pretrained(
        repository, device_map="auto", max_memory={"cpu": size // 2}, offload_folder=tmp_path
    )
    layers = {place: device for place, device in model.hf_device_map.items() if ".layers." in place}
    assert set(layers.values()) == {"cpu", "disk"}
    assert set(layers) == {f"model.layers.{i}" for i in range(4)}
    assert (denoising(model) - denoising(clover_model)).abs().max() < 1e-5


# ---- remote code, in processes that have never seen this package -------------------------------------------

FIRST_PROCESS = """
import json, sys
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache

work = sys.argv[1]
inputs = torch.load(work + "/inputs.pt")
ids, block = inputs["ids"], inputs["block"]
report = {"experts": {}, "layouts": {}, "classes": {}}
results = {}

def both(model):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        causal = model(ids, past_key_values=cache, use_cache=True).logits
        return causal, model(block, is_causal=False, past_key_values=cache).logits

# First of all, while no model of transformers' own has been made: that would teach the class of its experts.
for asked in (None, "grouped_mm", "batched_mm", "eager"):
    options = {} if asked is None else {"experts_implementation": asked}
    model = AutoModelForCausalLM.from_pretrained("someone/clover", trust_remote_code=True, **options)
    report["experts"][str(asked)] = model.config._experts_implementation
    results[f"experts {asked}"] = both(model)

for layout in inputs["layouts"]:
    model, info = AutoModelForCausalLM.from_pretrained(
        "someone/" + layout, trust_remote_code=True, output_loading_info=True
    )
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    report["layouts"][layout] = [type(model).__name__, missing, unexpected]
    results[f"layout {layout}"] = both(model)

config = AutoConfig.from_pretrained(inputs["snapshot"], trust_remote_code=True)
report["config"] = [type(config).__name__, config.model_type, config.block_size, config.mask_token_id]
for auto_class in (AutoModel, AutoModelForCausalLM):
    for place in ("someone/clover", inputs["snapshot"]):
        model = auto_class.from_pretrained(place, trust_remote_code=True)
        written = model.generate(ids, max_new_tokens=3)
        of = report["classes"].setdefault(auto_class.__name__, [])
        of.append([type(model).__name__, model.can_generate(), list(written.shape), type(model).__module__])
        results[f"class {auto_class.__name__} {place}"] = both(model)
model.save_pretrained(work + "/saved")
report["package"] = "clover" in sys.modules
torch.save(results, work + "/results.pt")
print(json.dumps(report))
"""

SECOND_PROCESS = """
import sys
import torch
from transformers import AutoModelForCausalLM, DynamicCache

work = sys.argv[1]
inputs = torch.load(work + "/inputs.pt")
model = AutoModelForCausalLM.from_pretrained(work + "/saved", trust_remote_code=True)
cache = DynamicCache(config=model.config)
with torch.no_grad():
    causal = model(inputs["ids"], past_key_values=cache, use_cache=True).logits
    denoising = model(inputs["block"], is_causal=False, past_key_values=cache).logits
torch.save([causal, denoising], work + "/reloaded.pt")
assert "clover" not in sys.modules
"""


def run(script: str, work: Path) -> str:
    """Runs a script in a process of its own: offline, away from the package, with an empty modules cache."""
    modules = work / f"modules-{hashlib.sha1(script.encode()).hexdigest()[:8]}"
    assert not modules.exists()
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(work / "hub"),
        "HF_MODULES_CACHE": str(modules),
        "PYTHONPATH": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", script, str(work)], cwd=work, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def as_hub_snapshot(folder: Path, cache: Path, name: str) -> Path:
    """A folder as the Hub's cache would hold it: files under their hashes, a snapshot of symbolic links."""
    repository = cache / f"models--someone--{name}"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / hashlib.sha1(name.encode()).hexdigest()
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blobs / digest)
        (snapshot / file.name).symlink_to(Path("../../blobs") / digest)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    return snapshot


@pytest.fixture(scope="module")
def remote(repository, stock_checkpoints, tmp_path_factory) -> dict:
    """What a process sees that knows no Clover but what it finds in the Hub's cache."""
    work = tmp_path_factory.mktemp("remote")
    release = json.loads((ROOT / "config.json").read_text())
    named = {layout.replace(" ", "-"): path for layout, path in stock_checkpoints.items()}
    named["clover"] = repository
    for name, source in named.items():
        folder = work / name
        shutil.copytree(source, folder)
        for code in CODE:
            shutil.copy(ROOT / code, folder)
        # A stock checkpoint becomes a Clover by these files and one entry in the text model's configuration.
        config = json.loads((folder / "config.json").read_text())
        config = config.get("text_config", config) | {"auto_map": release["auto_map"]}
        (folder / "config.json").write_text(json.dumps(config))
        snapshot = as_hub_snapshot(folder, work / "hub", name)
        if name == "clover":
            first = snapshot
    layouts = [name for name in named if name != "clover"]
    inputs = {"ids": IDS, "block": BLOCK, "layouts": layouts, "snapshot": str(first)}
    torch.save(inputs, work / "inputs.pt")
    report = json.loads(run(FIRST_PROCESS, work).splitlines()[-1])
    assert not report["package"], "the installed package would take the place of the remote code"
    return report | {"work": work, "results": torch.load(work / "results.pt")}


def test_both_auto_classes_give_a_clover_that_generates_from_the_hub_and_from_links(remote, clover_model):
    for auto_class in ("AutoModel", "AutoModelForCausalLM"):
        for name, can_generate, shape, module in remote["classes"][auto_class]:
            assert name == "CloverForDiffusionLM"
            assert module.startswith("transformers_modules.")
            assert can_generate
            assert shape == [2, 23]
    compared = [pair for name, pair in remote["results"].items() if name.startswith("class")]
    assert len(compared) == 4
    for its_causal, its_denoising in compared:
        assert torch.equal(its_causal, causal(clover_model))
        assert torch.equal(its_denoising, denoising(clover_model))


def test_the_configuration_loads_through_its_auto_class(remote):
    assert remote["config"] == ["CloverConfig", "clover_moe", 32, 63]


def test_remote_code_runs_the_experts_by_the_implementation_that_is_asked_for(remote):
    assert remote["experts"] == {
        "None": "grouped_mm",
        "grouped_mm": "grouped_mm",
        "batched_mm": "batched_mm",
        "eager": "eager",
    }
    reference = remote["results"]["experts None"]
    for asked in ("grouped_mm", "batched_mm", "eager"):
        for got, expected in zip(remote["results"][f"experts {asked}"], reference, strict=True):
            assert (got - expected).abs().max() < 2e-5, asked


@pytest.mark.parametrize("layout", LAYOUTS)
def test_remote_code_beside_any_qwen3_5_moe_text_checkpoint_makes_it_a_clover(layout, remote, stock_model):
    name, missing, unexpected = remote["layouts"][layout.replace(" ", "-")]
    assert name == "CloverForDiffusionLM"
    assert set(missing) == ADDED_KEYS
    assert unexpected == []
    its_causal, its_denoising = remote["results"]["layout " + layout.replace(" ", "-")]
    assert torch.equal(its_causal, causal(stock_model))
    assert its_denoising.isfinite().all()


def test_what_remote_code_saves_loads_in_another_fresh_process(remote, clover_model):
    saved = remote["work"] / "saved"
    for name in CODE:
        assert (saved / name).read_text() == (ROOT / name).read_text()
    run(SECOND_PROCESS, remote["work"])
    its_causal, its_denoising = torch.load(remote["work"] / "reloaded.pt")
    assert torch.equal(its_causal, causal(clover_model))
    assert torch.equal(its_denoising, denoising(clover_model))
