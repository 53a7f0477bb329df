"""The table of public names, commands and hooks that `ext/` adds to the core, each with the module that defines it.

No other file of the core names a module of `ext/`. A module is imported when one of its names is first used.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from lightning_dilated._removed import removed_name

#: {public name, relative to the package: "module:object", relative to `ext`}
NAMES = {
    "Exported": "export.export:Exported",
    "LongNetClassifier": "pooled.classifier:LongNetClassifier",
    "LongNetMLM": "masked.mlm:LongNetMLM",
    "SlideEncoder": "slides.encoder:SlideEncoder",
    "SlidePretrainer": "slides.mae:SlidePretrainer",
    "RecurrentState": "recurrence.state:RecurrentState",
    "StreamState": "streams.state:StreamState",
    "export": "export.export:export",
    "attention.attention_weights": "evaluation.attention_weights:attention_weights",
    "attention.hashed_attention": "hashed.functional:hashed_attention",
    "callbacks.AccuracyByDepth": "evaluation.accuracy_by_depth:AccuracyByDepth",
    "callbacks.AttentionWriter": "slides.attention_writer:AttentionWriter",
    "callbacks.BootstrapIntervals": "pooled.bootstrap:BootstrapIntervals",
    "callbacks.CommunicationProfiler": "profiling.communication:CommunicationProfiler",
    "callbacks.LossByPosition": "evaluation.loss_by_position:LossByPosition",
    "callbacks.MemoryProfiler": "profiling.memory.profiler:MemoryProfiler",
    "callbacks.MetricsProgressBar": "explain.metrics_bar:MetricsProgressBar",
    "callbacks.PredictionWriter": "evaluation.predictions:PredictionWriter",
    "callbacks.RecallByDistance": "evaluation.loss_by_position:RecallByDistance",
    "callbacks.RunReport": "explain.run_report:RunReport",
    "callbacks.ShardedCheckpoint": "checkpoints.sharded_checkpoint:ShardedCheckpoint",
    "callbacks.ThroughputMonitor": "profiling.throughput:ThroughputMonitor",
    "data.AlleleWindows": "genomes.variants:AlleleWindows",
    "data.ByteDataModule": "text.bytes:ByteDataModule",
    "data.ByteSequences": "text.bytes:ByteSequences",
    "data.ByteStream": "files.files:ByteStream",
    "data.ChatDataModule": "text.chat:ChatDataModule",
    "data.ChatStreamDataModule": "text.hf_chat:ChatStreamDataModule",
    "data.EncodedFiles": "text.encode_files:EncodedFiles",
    "data.FarRecallDataModule": "evaluation.recall_tasks:FarRecallDataModule",
    "data.Genome": "genomes.files:Genome",
    "data.GenomeDataModule": "genomes.fasta:GenomeDataModule",
    "data.GenomeWindows": "genomes.fasta:GenomeWindows",
    "data.LongContextDataModule": "evaluation.module:LongContextDataModule",
    "data.SlideDataModule": "slides.module:SlideDataModule",
    "data.SlideSequences": "slides.sequences:SlideSequences",
    "data.StreamDataModule": "text.endless:StreamDataModule",
    "data.StreamSequences": "text.endless:StreamSequences",
    "data.TextStreamDataModule": "text.hf_text:TextStreamDataModule",
    "data.TokenDataModule": "text.tokens:TokenDataModule",
    "data.Variant": "genomes.variants:Variant",
    "data.allele_windows": "genomes.variants:allele_windows",
    "data.check_coordinates": "slides.coordinates:check_coordinates",
    "data.decode_bases": "genomes.bases:decode_bases",
    "data.encode_bases": "genomes.bases:encode_bases",
    "data.encode_files": "text.encode_files:encode_files",
    "data.heat_map": "slides.heat_maps:heat_map",
    "data.read_variants": "genomes.variants:read_variants",
    "data.reverse_complement": "genomes.bases:reverse_complement",
    "data.write_attention": "slides.heat_maps:write_attention",
    "data.write_heat_map": "slides.heat_maps:write_heat_map",
    "data.write_synthetic_slides": "slides.synthetic:write_synthetic_slides",
    "integrations.transformers.HFCausalLM": "transformers.lm:HFCausalLM",
    "integrations.transformers.dilated_cache": "transformers.registration:dilated_cache",
    "integrations.transformers.register": "transformers.registration:register",
    "integrations.transformers.set_pattern": "transformers.patterns:set_pattern",
    "pattern.Explanation": "explain.explanation:Explanation",
    "planning.Machine": "planning.machine:Machine",
    "planning.Meter": "planning.counting.memory_tracker:Meter",
    "planning.Step": "planning.ranks:Step",
    "planning.dense_yardstick": "planning.gpus:dense_yardstick",
    "planning.peak_memory": "planning.gpus:peak_memory",
    "planning.seconds_of": "planning.gpus:seconds_of",
    "planning.step_on_ranks": "planning.ranks:step_on_ranks",
    "sequence.SequenceConv1d": "convolution.halo:SequenceConv1d",
    "sequence.sequence_halo": "convolution.halo:sequence_halo",
    "recurrence.RecurrentState": "recurrence.state:RecurrentState",
    "recurrence.recurrent_attention": "recurrence.functional:recurrent_attention",
    "recurrent_attention": "recurrence.functional:recurrent_attention",
    "models.LongNetClassifier": "pooled.classifier:LongNetClassifier",
    "models.LongNetMLM": "masked.mlm:LongNetMLM",
    "models.SlideEncoder": "slides.encoder:SlideEncoder",
    "models.SlidePretrainer": "slides.mae:SlidePretrainer",
}

#: {"module:object": its shortest public name}
_PUBLIC = {where: name for name, where in sorted(NAMES.items(), key=lambda row: -len(row[0]))}

#: {command: the function that runs it}
COMMANDS = {
    "bench": "profiling.bench_links:run",
    "consolidate": "export.consolidate:run",
    "evaluate": "evaluation.evaluate:run",
    "explain": "explain.command:run",
    "export": "export.command:run",
    "folds": "pooled.folds:run",
    "generate": "decoding.command:run",
    "plan": "planning.plan:run",
    "score": "genomes.score:run",
    "tokenize": "text.tokenize:tokenize",
    "verify": "profiling.verify:run",
}

#: {task that the core leaves to an extension: the function or class that does the task}
HOOKS = {
    "advice about layouts": "explain.advice:balance_hint",
    "advice about patterns": "explain.advice:advice",
    "cache of a layer": "decoding.kv_cache:KVCache.of_layer",
    "caches of a stack": "decoding.kv_cache:new_caches",
    "check the name of a tokenizer": "text.load_tokenizer:checked_source",
    "check of the first batch": "profiling.first_batch:check_first_batch",
    "checkpoint of regions": "regions.training:warn_of_other_regions",
    "cuda graphs": "graphs.cuda_graphs:CudaGraphs",
    "decoder of a folder": "transformers.lm:decoder_of",
    "embed sequences": "genomes.scoring:embed",
    "explain a model": "explain.model:explain_model",
    "explain patterns": "explain.explanation:explain",
    "float8 layers": "float8.float8:to_float8",
    "free generation memory": "decoding.token_step:forget",
    "generate stream": "decoding.generation:generate_stream",
    "generate": "decoding.generation:generate",
    "hashed heads of a layer": "hashed.heads:HashedHeads",
    "load a tokenizer": "text.load_tokenizer:load_text_tokenizer",
    "maps of a recurrence": "recurrence.scan:maps_received",
    "model table": "explain.model_table:ModelTable",
    "other strand": "genomes.strands:OtherStrand",
    "plot a pattern": "explain.explanation:plot",
    "progress of chunks": "streams.progress:ChunkProgress",
    "read torchscale": "export.torchscale:read",
    "recurrence of a layer": "recurrence.branch:RecurrentBranch",
    "remote files": "text.remote:RemoteFiles",
    "score alleles": "genomes.scoring:score_alleles",
    "score sequences": "genomes.scoring:score",
    "short convolution of a layer": "convolution.convolution:ShortConvolution",
    "stream of a stack": "streams.stream:Stream",
    "streams of a model": "streams.losses:ModelStreams",
    "training in regions": "regions.training:RegionTraining",
}


def public_path(path: str) -> str:
    """Return the public path of a class below `ext/`, to store in files; return other paths unchanged."""
    module, _, name = path.removeprefix("lightning_dilated.ext.").rpartition(".")
    for where, public in _PUBLIC.items() if path.startswith("lightning_dilated.ext.") else ():
        inside, _, defined = where.partition(":")
        if name == defined and f"{inside}.".startswith(f"{module}."):
            return f"lightning_dilated.{public}"
    return path


def place(where: str) -> Any:
    """Import the object "module:object" of a table."""
    return pkgutil.resolve_name(f"lightning_dilated.ext.{where}")


def hook(task: str) -> Any:
    """Import the function or class that does a task in `HOOKS`."""
    return place(HOOKS[task])


def lazy_names(face: str, core: dict[str, str] | None = None) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for an `__init__.py` (PEP 562), which import public names on their first use.

    Args:
        face: `__name__` of the `__init__.py`.
        core: {further name: "module:object", or "module" for a module}, relative to the package.
    """
    prefix = face.removeprefix("lightning_dilated").removeprefix(".")
    rows = {name: f"ext.{where}" for name, where in NAMES.items() if name.rpartition(".")[0] == prefix}
    names = {name.rpartition(".")[2]: where for name, where in rows.items()} | (core or {})

    def __getattr__(name: str) -> Any:
        if name not in names:
            if (message := removed_name(f"{face}.{name}")) is not None:
                raise ImportError(message)  # `from face import name` hides the message of an AttributeError
            raise AttributeError(f"module {face!r} has no attribute {name!r}")
        value = pkgutil.resolve_name(f"lightning_dilated.{names[name]}")
        setattr(sys.modules[face], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[face]), *names})

    return __getattr__, __dir__
