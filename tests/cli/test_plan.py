"""`plan` from sizes or recipes: the numbers of `planning`, lines for a recipe, and errors."""

import argparse
import json
import re
from pathlib import Path

import pytest
import yaml

from lightning_dilated import DilatedPattern
from lightning_dilated.callbacks import ActivationRecompute
from lightning_dilated.ext.planning.candidates import candidates, yaml_lines
from lightning_dilated.ext.planning.counting.footprint import footprint
from lightning_dilated.ext.planning.counting.model_specs import counted_model_of
from lightning_dilated.ext.planning.memory import bytes_moved_at_fit_end, memory
from lightning_dilated.ext.planning.plan_request import number, parser, resolve_request
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.sequence.head_size import plan_in_groups
from lightning_dilated.sequence.links import Links
from lightning_dilated.sequence.planner import make_problem, most_held

pytestmark = pytest.mark.full

GIB = 2**30
SIZES = ["--dim", 64, "--depth", 2, "--heads", 4, "--segments", 64, 128, "--dilations", 1, 2, "--no-compile"]
BLOCK = ["--policy", "block"]
LM = {"class_path": "LongNetLM", "init_args": {"pattern": {"segment_lengths": [64], "dilation_rates": [1]}}}


def row(result, setting):
    """Return the numbers in the table row of a setting."""
    (line,) = (x[2:] for x in result.out.splitlines() if x[2:].startswith(setting + "  "))
    return [float(x.rstrip("%!").replace(",", "")) for x in line[len(setting) :].split() if x not in ("!",)]


def kind(result, name):
    """Return the GiB of one kind of memory in the recommended setting."""
    (line,) = (x for x in result.out.splitlines() if x.strip().startswith(name) and x.split()[-1] == "GiB")
    return float(line.split()[-2])


def parsed(*argv):
    return resolve_request(parser().parse_args(list(map(str, argv))))


def recipe(folder, model=LM, strategy=None, **parts):
    """Write a recipe and return its options. `strategy` holds arguments of RingDilatedStrategy."""
    if strategy is not None:
        named = {"class_path": "lightning_dilated.RingDilatedStrategy", "init_args": strategy}
        parts["trainer"] = {**parts.get("trainer", {}), "strategy": named}
    (folder / "x.yaml").write_text(yaml.safe_dump({"model": model, **parts}))
    return ["--config", folder / "x.yaml"]


def test_numbers_are_those_of_planning(cli):
    result = cli("plan", *SIZES, "--tokens", "1M", *BLOCK).ok()
    model = parsed(*SIZES).model
    plan = footprint(counted_model_of(model, memory=MemorySettings("block")))
    x = memory(plan, 1 << 20)
    longest, gib, host, *_ = row(result, "block")
    assert gib == pytest.approx(x.peak / GIB, abs=0.05) and host == 0
    assert memory(plan, int(longest)).peak <= 0.97 * 139.8 * GIB
    for name, size in x.kinds.items():
        assert kind(result, name) == pytest.approx(size / GIB, abs=0.005)
    assert "1 x H200, single, adamw" in result.out and "ActivationRecompute" in result.out
    (end,) = (line.split() for line in result.out.splitlines() if "as fit ends" in line)
    assert float(end[3]) == pytest.approx(bytes_moved_at_fit_end(plan, Setup()) / GIB, abs=0.005)


def test_links_are_those_of_the_gpu(cli, tmp_path):
    """GPUs without NVLink are slower, the output marks guessed bandwidths, and a file of measured links wins."""
    steps = {}
    for gpu in ("H200", "L40S", "RTX4090"):
        result = cli("plan", *SIZES, "--tokens", "64K", *BLOCK, "--gpus", 4, "--gpu", gpu).ok()
        (note,) = (line for line in result.out.splitlines() if "links:" in line)
        assert ("near 259 GB/s" in note) == (gpu == "H200") == ("a guess" not in note)
        assert ("no NVLink" in note) == (gpu != "H200")
        steps[gpu] = parsed(*SIZES, "--tokens", "64K", "--gpus", 4, "--gpu", gpu).setup("ring_dilated").links.near
    assert steps["H200"] > 10 * steps["L40S"] > 10 * steps["RTX4090"]
    Links(near=5e9, far=1e9, source="here").save(tmp_path / "links.json")
    links = parsed(*SIZES, "--gpu", "L40S", "--gpus", 4, "--links", tmp_path / "links.json").links
    assert links == Links(near=5e9, far=1e9) and links.source == "here"


def test_compares_settings_and_recommends_the_first_that_fits(cli, tmp_path):
    few = ["--depth", 1, "--heads", 1]  # neither groups of layers nor chunks of heads are possible
    result = cli(
        "plan", *SIZES, *few, "--tokens", "1M", "--gpu", "A10", "--gpu-memory", 4, "--plot", "plots/plan.png"
    ).ok()
    all_kept, block = row(result, "all kept"), row(result, "block")
    assert all_kept[1] > block[1] and all_kept[0] < block[0]
    (best,) = (line for line in result.out.splitlines() if line.startswith("* "))
    assert " !" not in best
    png = (tmp_path / "plots" / "plan.png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 20000


def test_parameters_on_the_host(cli):
    gpus = ["--tokens", "64K", "--gpus", 4, *BLOCK]
    plain = cli("plan", *SIZES, *gpus, "--strategy", "ring_dilated_fsdp")
    result = cli("plan", *SIZES, *gpus, "--cpu-offload").ok()
    assert "ring_dilated_fsdp with cpu_offload" in result.out and "optimizer, on the host" in result.out
    assert "states on the host" in result.out and "The assumptions of a plan" in result.out
    assert kind(result, "parameters") <= kind(plain, "parameters") and "optimizer states" not in result.out
    lines = [x for x in result.out.splitlines() if x.startswith("  trainer:") or x.startswith("    ")]
    strategy = yaml.safe_load("\n".join(lines[lines.index("  trainer:") :]))["trainer"]["strategy"]
    assert strategy == {"class_path": "lightning_dilated.RingDilatedFSDPStrategy", "init_args": {"cpu_offload": True}}


def test_names_the_layout_that_balances_ranks(cli, tmp_path):
    """The output suggests the zigzag layout if the last rank computes much longer than the others."""
    dense = ["--dim", 64, "--depth", 2, "--heads", 4, "--segments", "1M", "--dilations", 1, "--no-compile", *BLOCK]
    plan = [*dense, "--tokens", "256K", "--gpus", 4, "--exchange", "gather"]
    hint = "RingDilatedStrategy(layout='zigzag') every rank has an early and a late part, and a step takes"
    for causal, named in (("--causal", True), ("--no-causal", False)):
        result = cli("plan", *plan, causal)
        assert result.code == 0 and (hint in result.out) == named, result.err
    result = cli("plan", *recipe(tmp_path, strategy={"layout": "zigzag"}), "--gpus", 4, "--tokens", "64K", *BLOCK)
    assert result.code == 0 and hint not in result.out, result.err
    assert "sequence_size" not in result.out.replace("sequence_size: 1 of", "")


def test_layers_with_a_recurrence(cli, tmp_path):
    """With recurrence in some layers, the table has its time, omits settings that it excludes, and notes untimed parts."""
    lines = {}
    for name, recurrence in (("x", [None, {"kind": "gated_delta"}]), ("y", None)):
        sizes = {**LM["init_args"], "dim": 64, "depth": 2, "num_heads": 4, "recurrence": recurrence}
        written = recipe(tmp_path, {**LM, "init_args": sizes})
        result = cli("plan", *written, "--no-compile", "--tokens", "64K", "--gpus", 2).ok()
        lines[name] = result.out.splitlines()
        assert ("head_chunks" in result.out) == (name == "y")
        assert ("rule as measured on NVIDIA H100" in result.out) == (name == "x")
        assert ("the time of these maps is not counted" in result.out) == (name == "x")
    rows = [[x.split() for x in table if x.strip().startswith("recurrence  ")] for table in lines.values()]
    assert not rows[1] and rows[0][0][2] == "ms" and float(rows[0][0][1]) > 0


@pytest.mark.parametrize("size, shared_by", [([8, 4, 2], 2), (3, 3), ("auto", None), (6, None), (4, None)], ids=str)
def test_a_recipes_sequence_size(tmp_path, size, shared_by):
    written = recipe(tmp_path, strategy={"sequence_size": size})
    assert parsed(*written, "--gpus", 6).shared_by == shared_by


@pytest.mark.parametrize(
    "devices, gpus, beside", [(1, [], 1), (8, [], 1), (8, ["--gpus", 1], 8), ("auto", ["--gpus", 1], 1)]
)
def test_gpus_to_average_gradients_with(tmp_path, devices, gpus, beside):
    """DDP's copies of gradients are counted only if other GPUs of the recipe train on other data."""
    written = recipe(tmp_path, trainer={"strategy": "ring_dilated", "devices": devices})
    setup = parsed(*written, *gpus).setup("ring_dilated")
    assert setup.data_ranks == beside and setup.strategy == "ring_dilated"


def test_the_command_line_wins():
    x = parsed("--config", "recipes/ring_4gpu.yaml", "--gpus", 16, "--tokens", "2M", "--dim", 384, "--exchange", "ring",
              "--precision", "bf16-true")  # fmt: skip
    assert (x.ranks, x.per_node, x.tokens, x.model.dim, x.model.depth) == (16, 8, 1 << 21, 384, 12)
    assert (x.exchange, x.precision, x.strategy, x.compile_blocks) == ("ring", "bf16-true", "ring_dilated", False)
    assert x.settings is None and x.model.causal


def test_a_recipes_settings_give_way(tmp_path):
    callback = {"class_path": "lightning_dilated.callbacks.ActivationRecompute", "init_args": {"every": 2, "tile": 512}}
    options = {"exchange": "gather"}
    strategy = {"class_path": "lightning_dilated.RingDilatedFSDPStrategy", "init_args": options}
    trainer = {"strategy": strategy, "devices": 2, "num_nodes": 3, "callbacks": [callback]}
    x = parsed(*recipe(tmp_path, trainer=trainer), "--tile", 1024, "--nodes", 3)
    assert x.settings == MemorySettings("block", 2, tile=1024)
    assert (x.strategy, x.exchange, x.ranks, x.per_node) == ("ring_dilated_fsdp", "gather", 6, 2)
    assert not x.cpu_offload
    for value, want in (({"pin_memory": False}, True), (False, False), (True, True)):
        options["cpu_offload"] = value
        assert parsed(*recipe(tmp_path, trainer=trainer)).cpu_offload is want
        assert parsed(*recipe(tmp_path, trainer=trainer), "--cpu-offload").cpu_offload
    assert not parsed("--config", tmp_path / "x.yaml", "--no-cpu-offload").cpu_offload
    assert not parsed("--config", tmp_path / "x.yaml", "--strategy", "ring_dilated").cpu_offload


def test_a_recipes_buckets(cli, tmp_path):
    """Only RingDilatedStrategy has a bucket size, which is read from the recipe."""
    model = {**LM, "init_args": {**LM["init_args"], "dim": 64, "depth": 2, "num_heads": 4}}
    with_buckets = lambda **size: recipe(tmp_path, model, size, trainer={"devices": 2})  # noqa: E731
    plan = [*BLOCK, "--tokens", "64K"]
    x = parsed(*with_buckets(bucket_cap_mb=25))
    assert x.setup("ring_dilated") == Setup("ring_dilated", 2, 2, bucket_cap_mb=25)
    assert x.setup("ring_dilated_fsdp").bucket_cap_mb is None
    result = cli("plan", *with_buckets(bucket_cap_mb=25), *plan)
    assert result.code == 0 and "Gradients are summed 25 MiB at a time" in result.out, result.err
    lines = yaml.safe_load("\n".join(yaml_lines(MemorySettings(), x.setup("ring_dilated"))))
    assert lines["trainer"]["strategy"]["init_args"] == {"bucket_cap_mb": 25}
    refused = cli("plan", *with_buckets(bucket_cap_mb=0), *plan)
    assert refused.code == 2 and "bucket_cap_mb must be at least 1, got 0" in refused.err
    assert parsed(*with_buckets()).setup("ring_dilated").bucket_cap_mb is None


@pytest.mark.parametrize("settings", [
    MemorySettings("attention-kept"),
    MemorySettings("block"),
    MemorySettings("block", 2, 0.5, 4096, 2),
    MemorySettings(tile=4096),
])  # fmt: skip
def test_lines_of_a_recipe_have_the_settings(settings):
    config = yaml.safe_load("\n".join(yaml_lines(settings, Setup("ring_dilated", 16, 8), "bfloat16")))
    (callback,) = config["trainer"]["callbacks"]
    assert callback["class_path"].endswith("ActivationRecompute")
    assert ActivationRecompute(**callback.get("init_args") or {}).settings == settings
    assert config["trainer"]["devices"] == 8 and config["trainer"]["num_nodes"] == 2
    assert config["model"]["init_args"]["residual_dtype"] == "bfloat16"


def saved(result):
    """Parse a recipe printed by `plan`."""
    lines = result.out.split("can be saved and run by `lightning-dilated fit --config FILE`:\n\n")[1].split("\n\n")[0]
    return yaml.safe_load(lines)


def test_the_whole_recipe_is_printed_and_runs(cli, tmp_path):
    """The printed recipe keeps layout, callbacks, data and model, has the planned options and settings, and runs."""
    config = yaml.safe_load(Path("recipes/quickstart.yaml").read_text())
    strategy = {"class_path": "lightning_dilated.RingDilatedStrategy", "init_args": {"layout": "zigzag"}}
    recompute = {"class_path": "lightning_dilated.callbacks.ActivationRecompute", "init_args": {"tile": 64}}
    config["trainer"]["strategy"] = strategy
    config["trainer"]["callbacks"].insert(1, recompute)
    config["data"]["init_args"] |= {"paths": "text.txt", "val_limit": 2}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(config))
    result = cli("plan", "--config", "x.yaml", *BLOCK, "--tokens", 128, "--exchange", "gather", "--depth", 2).ok()
    printed = saved(result)
    config["trainer"]["strategy"]["init_args"]["exchange"] = "gather"
    config["trainer"]["callbacks"][1]["init_args"] = {"policy": "block", "tile": 64}
    config["trainer"]["precision"] = "bf16-mixed"
    config["model"]["init_args"]["depth"], config["data"]["init_args"]["seq_len"] = 2, 128
    assert printed == config
    (tmp_path / "y.yaml").write_text(yaml.safe_dump(printed))
    run = cli("fit", "--config", "y.yaml", "--trainer.max_steps", 1, "--trainer.val_check_interval", 1)
    assert run.code == 0 and [*tmp_path.rglob("last.ckpt")], run.err


def test_a_recipe_of_sizes_runs(cli, tmp_path):
    argv = [*SIZES, "--policy", "none", "--tokens", 256, "--strategy", "ring_dilated"]
    result = cli("plan", *argv, "--kv_heads", 2).ok()
    (tmp_path / "y.yaml").write_text(yaml.safe_dump(saved(result)))
    argv = ["--data.paths", "text.txt", "--data.val_limit", 2, "--trainer.accelerator", "cpu"]
    cli("fit", "--config", "y.yaml", *argv, "--trainer.max_steps", 1).ok()


def test_a_recipe_for_other_gpus(cli):
    """The command's options set devices and nodes. Recomputation is removed if `plan` does not recommend it."""
    argv = ["--config", "regions.yaml", "--tokens", "64K", "--gpus", 16, "--policy", "none"]
    result = cli("plan", *argv, "--strategy", "ring_dilated_fsdp", "--head_size", 2).ok()
    printed = saved(result)["trainer"]
    assert (printed["devices"], printed["num_nodes"]) == (8, 2)
    path = "lightning_dilated.RingDilatedFSDPStrategy"
    assert printed["strategy"] == {"class_path": path, "init_args": {"head_size": 2}}
    names = [x["class_path"].rpartition(".")[2] for x in printed["callbacks"]]
    assert "ShardedCheckpoint" in names and "ActivationRecompute" not in names


def test_numbers():
    assert [number(x) for x in ("8", "64K", "8m", "1G", "1.5K", "1,024")] == [8, 1 << 16, 1 << 23, 1 << 30, 1536, 1024]
    for wrong in ("", "K", "-1", "0", "1.3", "1T", "8MB"):
        with pytest.raises(argparse.ArgumentTypeError, match="no whole number"):
            number(wrong)


FEW = ["--dim", 64, "--depth", 2, "--heads", 4, "--no-compile", *BLOCK]
STREAM = [*FEW, "--segments", 64, 4096, "--dilations", 1, 64, "--tokens", "1M", "--stream", "64K", "--gpus"]
#: name: (arguments, patterns in the output, patterns that must not be in the output)
SAID = {
    "walls": (
        [*SIZES, *BLOCK, "--tokens", "64K"],
        ["whatever the GPUs", "511 wall(s): attention never crosses position 128"],
        [],
    ),
    "no walls": ([*FEW, "--segments", 64, 65536, "--dilations", 1, 2, "--tokens", "64K"], [], ["wall(s)"]),
    "four GPUs": (
        [
            *FEW,
            "--geometric",
            64,
            "--tokens",
            "64K",
            "--gpus",
            4,
            "--strategy",
            "ring_dilated_fsdp",
            "--host_memory",
            64,
        ],
        [
            *("4 x H200, ring_dilated_fsdp", "16,384 a rank", "strategy: ring_dilated_fsdp", "devices: 4"),
            *("exchange ", "backward", "not taken, takes"),
        ],
        [],
    ),
    "512 GPUs": (
        [*FEW, "--geometric", "2K", "--tokens", "32M", "--gpus", 512],
        ["512 x H200, 64 nodes, ring_dilated", "num_nodes: 64"],
        [],
    ),
    "a recipe": (
        ["--config", "ring_4gpu.yaml", *BLOCK, "--no-compile"],
        [
            *("4 x H200, ring_dilated", "1,048,576 tokens, 262,144 a rank"),
            "85.2M parameters, 12 blocks of 768, 12 heads of 64, bf16-mixed, blocks not compiled",
        ],
        [],
    ),
    "regions": (
        ["--config", "regions.yaml", *BLOCK, "--no-compile", "--gpus", 16, "--tokens", "64K"],
        [
            "puts a sequence on 8 of the 16 GPUs, which train 2 at a time",
            "shared parameters and momentum take 8 bytes a trained parameter more",
        ],
        [],
    ),
    "a sequence on some GPUs": (
        ["--config", "elastic.yaml", *BLOCK, "--no-compile", "--gpus", 16, "--tokens", "64K"],
        ["16 x H200", "which train 2 at a time; this plan puts one on all of them"],
        ["outer steps"],
    ),
    "chunks": ([*STREAM, 1], ["stream=65536", "16 chunks; one, forward and backward:", "stream: 65536"], []),
    "shared chunks": (
        [*STREAM, 2],
        [
            *("exchange gather, a rank on the mean, of all 2 layers and all chunks:", "layout: chunked"),
            "the GPUs share every chunk of a stream",
        ],
        [],
    ),
    "nothing fits": (
        [*SIZES, *BLOCK, "--tokens", "1G"],
        ["1,073,741,824 tokens do not fit: the longest is", "no setting fits", "--residual_dtype bfloat16"],
        ["in the recipe", "--stream"],
    ),
    "no chunk fits": (
        [*SIZES, *BLOCK, "--tokens", "1G", "--stream", 1],
        ["Take another --stream (without --stream and --policy, plan proposes one), about"],
        [],
    ),
    "no slide fits": (
        ["--config", "slides.yaml", *BLOCK, "--tokens", "1G"],
        ["GPUs, or --host_memory to offload to"],
        [],
    ),
    "no parameters fit": (
        [*SIZES, *BLOCK, "--tokens", "1K", "--dim", "4K", "--heads", 32, "--gpu-memory", 2],
        ["Parameters, gradients and states alone do not fit. Take --strategy ring_dilated_fsdp"],
        [],
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_what_a_plan_says(cli, tmp_path, name):
    argv, says, leaves_out = SAID[name]
    sizes = {"dim": 64, "depth": 1, "num_heads": 4, "decoder_depth": 1, "decoder_dim": 64}
    model = {"class_path": "SlidePretrainer", "init_args": sizes}
    (tmp_path / "slides.yaml").write_text(yaml.safe_dump({"model": model}))
    result = cli("plan", *argv).ok()
    assert not [x for x in says if x not in result.words] and not [x for x in leaves_out if x in result.words]


REFUSED = {
    "nothing": ([], "plan needs --dim, --depth, --heads, or a recipe"),
    "half": ([*SIZES[:9], "--tokens", "1K"], "--segments and --dilations belong together"),
    "two patterns": ([*SIZES, "--geometric", 64, "--tokens", "1K"], "give --geometric or --segments"),
    "no end": (
        [*SIZES[:6], "--geometric", 64],
        "--geometric ends with a segment over the whole sequence: give --tokens",
    ),
    "another kind": ([*SIZES, "--gpu", "V100"], "--gpu must be one of H200"),
    "memory": ([*SIZES, "--gpu-memory", 0], "--gpu-memory must be GiB"),
    "nodes": ([*SIZES, "--gpus", 6, "--nodes", 4], "--nodes 4 must divide --gpus 6"),
    "single": ([*SIZES, "--gpus", 2, "--strategy", "single"], "--strategy single is for one GPU, not for 2"),
    "tokens": ([*SIZES, "--tokens", "many"], "'many' is no whole number"),
    "every": ([*SIZES, "--policy", "none", "--every", 2], 'it needs policy="block"'),
    "heads": (
        [*SIZES, "--head-chunks", 8, "--policy", "block", "--tokens", "1K"],
        "head_chunks=8 must be at most the 4",
    ),
    "host": ([*SIZES, "--host-memory", -1], "--host_memory must be GiB of a node"),
    "sizes": ([*SIZES[:5], 3], "num_heads=3 must divide dim=64"),
    "no recipe": (["--config", "nowhere.yaml"], "no such file, and no recipe of that name"),
    "no model": (["--config", "empty.yaml"], "has no model with a class_path"),
    "no counting": (["--config", "other.yaml"], "DilatedModule must define example_batch(tokens)"),
    "true steps": (
        ["--config", "quickstart.yaml", "--find-max"],
        "Leave it out: plan prints the longest sequence of each setting",
    ),
    "links": ([*SIZES, "--links", "nowhere.json"], "nowhere.json"),
    "whole parameters": (
        [*SIZES, "--cpu_offload", "--strategy", "ring_dilated"],
        "--strategy ring_dilated_fsdp only, not with ring_dilated",
    ),
    "a chunk of sharded parameters": (
        [*SIZES, *BLOCK, "--gpus", 2, "--stream", "64K", "--strategy", "ring_dilated_fsdp"],
        "--stream 65536 is not offered with ring_dilated_fsdp",
    ),
    "causal": (["--config", "quickstart.yaml", "--no-causal"], "--causal False: a LongNetLM has no causal. Leave the"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(cli, tmp_path, name):
    argv, says = REFUSED[name]
    (tmp_path / "empty.yaml").write_text("trainer: {}\n")
    (tmp_path / "other.yaml").write_text("model: {class_path: lightning_dilated.DilatedModule}\n")
    result = cli("plan", *argv)
    assert result.code == 2 and says in " ".join(result.err.split()) and result.out == "", result.err


@pytest.mark.parametrize("strategy", ["single", "ring_dilated", "ring_dilated_fsdp"])
@pytest.mark.parametrize("settings", [MemorySettings(), MemorySettings("block"), MemorySettings(tile=4096)], ids=str)
def test_no_line_is_left_empty(settings, strategy):
    """The lines contain no `init_args:` without content, which would be an invalid recipe."""
    lines = "\n".join(yaml_lines(settings, Setup(strategy, 1, 1)))
    assert "null" not in json.dumps(yaml.safe_load(lines)) or not lines


def test_stream_alone_is_of_all_settings():
    sizes = ["--dim", "64", "--depth", "2", "--heads", "4", "--segments", "64", "--dilations", "1", "--gpus", "1"]
    request = resolve_request(parser().parse_args([*sizes, "--stream", "64K"]))
    assert request.settings is None and request.stream == 65536
    request = resolve_request(parser().parse_args([*sizes, "--stream", "64K", "--policy", "block"]))
    assert request.settings == MemorySettings("block", stream=65536)
    recipe = ["--config", "recipes/billion.yaml", "--gpus", "1", "--stream", "64K"]
    assert resolve_request(parser().parse_args(recipe)).settings is None, "as without --stream"


@pytest.mark.slow
def test_stream_alone_compares_settings(cli):
    """A pass over a chunk may store everything if it fits. Otherwise the table recommends recomputation."""
    sizes = ["--dim", "1024", "--depth", "8", "--heads", "8", "--segments", "2048", "--dilations", "1", "--no-compile"]
    result = cli("plan", *sizes, "--gpu", "H100", "--gpus", "1", "--tokens", "4M", "--stream", "1M").ok()
    table = result.out.partition("tokens/s")[2].partition("  *: recommended")[0].splitlines()[1:]
    rows = [line for line in table if not line.startswith("  !:")]
    assert len(rows) == len(candidates(8, depth=8)) and all("stream=1048576" in line for line in rows)
    assert "all kept, stream=1048576" in rows[0] and rows[0].endswith("!") and any(x.startswith("* ") for x in rows[1:])


def test_data_of_streams(cli, tmp_path):
    pattern = DilatedPattern.longnet([64, 128], [1, 2]).to_dict()
    sizes = {"pattern": pattern, "dim": 64, "depth": 2, "num_heads": 4}
    data = {"paths": "text", "seq_len": 1024, "streams": 8}
    streams = {"class_path": "StreamDataModule", "init_args": data}
    written = recipe(tmp_path, {**LM, "init_args": sizes}, data=streams)
    result = cli("plan", *written, *BLOCK, "--gpu", "H200", "--gpus", 1).ok()
    assert "the recipe's data are 8 streams; this plan is for one step of one stream" in " ".join(result.out.split())


def test_prints_the_head_size_that_is_chosen(cli, tmp_path):
    sizes = ["--dim", 768, "--depth", 2, "--heads", 12, "--segments", "1M", "--dilations", 1, "--no-compile", *BLOCK]
    result = cli("plan", *sizes, "--tokens", "1M", "--gpus", 8, "--head_size", "auto", "--exchange", "gather")
    problem = make_problem(DilatedPattern.dense(1 << 20), 1 << 20, 12, ranks=8, causal=True)
    lines = plan_in_groups(problem, 0, "gather", ranks_per_node=8).head_lines()
    assert result.code == 0 and lines[0] == "head_size: 8" and all(f"    {x}\n" in result.out for x in lines)
    assert "with head_size=auto ranks also trade tokens for heads" in result.out
    assert re.search(r"tokens for heads +[0-9.]+ ms", result.out)
    of_recipe = [*recipe(tmp_path, {"class_path": "LongNetLM"}, {"head_size": "auto"}), *SIZES]
    assert parsed(*of_recipe).head_size == "auto"
    assert parsed(*of_recipe, "--head_size", 2).head_size == 2


def test_bounds_the_exchange(cli):
    """The plan chooses an exchange within the limit, the longest sequence respects it, and errors name the minimum."""
    sizes = ["--dim", 1024, "--depth", 2, "--heads", 16, "--segments", "1G", "--dilations", 1, "--no-compile", *BLOCK]
    plan_of = lambda *options: cli("plan", *sizes, "--gpus", 8, *options)  # noqa: E731
    problem = make_problem(DilatedPattern.dense(1 << 30), 1 << 20, 16, ranks=8, causal=True)
    least = most_held(problem, "ring", 8, 64, 2) / GIB
    free, bounded = plan_of("--tokens", "1M"), plan_of("--tokens", "1M", "--exchange_memory_gib", least + 0.01)
    assert "exchange switch, a rank" in free.out and "exchange ring, a rank" in bounded.out
    assert "more than exchange_memory_gib" in bounded.out
    refused = plan_of("--tokens", "1M", "--exchange_memory_gib", least / 2)
    assert refused.code != 0 and "no exchange of this call holds as little as exchange_memory_gib" in refused.err
    longest = [int(row(plan_of(*extra), "block")[0]) for extra in ((), ("--exchange_memory_gib", least))]
    assert 0.9 * (1 << 20) < longest[1] <= 1 << 20 < longest[0]
