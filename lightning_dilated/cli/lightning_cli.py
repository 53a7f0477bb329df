"""LightningCLI for fit, validate, test and predict with any DilatedModule and LightningDataModule.

Recipes are found by name. A checkpoint's model settings override a recipe's, and options override both.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks import BasePredictionWriter, ModelSummary, RichProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import lightning_dilated
from lightning_dilated import callbacks
from lightning_dilated._extensions import hook
from lightning_dilated.callbacks import MetricsProgressBar, PredictionWriter
from lightning_dilated.cli.errors import PROG, fail, one_line_errors, summarize_error, wants_traceback
from lightning_dilated.cli.load_model import checkpoint_settings, read_checkpoint
from lightning_dilated.cli.parsing import Parser
from lightning_dilated.cli.parsing.settings import CONFIG, chosen_classes, options, settings, with_parts
from lightning_dilated.cli.recipe import class_of, with_length
from lightning_dilated.data import ByteDataModule
from lightning_dilated.models import DilatedModule
from lightning_dilated.strategy import launched_nodes

#: words that Lightning accepts for ckpt_path instead of a path
CKPT_WORDS = ("best", "last", "hpc", "registry")


def with_checkpoint(argv: list[str]) -> list[str]:
    """Return the words of recipes, the checkpoint's model settings, and other options; later words override earlier."""
    listed, values, class_name = options(argv), settings(argv), chosen_classes(argv)["model"]
    path = dict(values).get(("ckpt_path",))
    is_folder = bool(path) and Path(path).is_dir()
    if any(option.key[-1] in ("h", "help", "print_config") for option in listed):
        return argv
    if not path or path in CKPT_WORDS or is_folder:
        if is_folder and not (Path(path) / ".metadata").exists():
            fail(f"--ckpt_path {path} is a folder, but not a sharded checkpoint. Pass a .ckpt file inside it.")
        if not class_name:
            fail(f"{argv[0]} needs a model: give --config RECIPE.yaml, --ckpt_path FILE.ckpt, or --model CLASS.")
        return argv
    if argv[0] == "fit" and not class_name:
        fail(
            f"fit needs --config next to --ckpt_path {path}: a checkpoint does not hold the settings of its optimizer. "
            "The config.yaml in its run folder does." + _recipe_of_run(path)
        )
    set_here = {key[1] for key, _ in values if key[0] == "model" and len(key) > 1}
    recipes = [word for option in listed if option.key == CONFIG for word in option.words]
    other_words = [word for option in listed[1:] if option.key != CONFIG for word in option.words]
    return [argv[0], *recipes, *checkpoint_settings(path, class_name, set_here), *other_words]


class Trainer(pl.Trainer):
    """Lightning's Trainer.

    Args:
        num_nodes: number of nodes; "auto": the number that torchrun or SLURM started.
    """

    def __init__(self, *, num_nodes: int | Literal["auto"] = 1, **kwargs: Any) -> None:
        super().__init__(num_nodes=launched_nodes() if num_nodes == "auto" else num_nodes, **kwargs)


def import_public_classes() -> None:
    """Import this package's models, data and callbacks, so that a parser finds them by their short names."""
    for face in (callbacks, lightning_dilated.data, lightning_dilated):
        for name in face.__all__:
            getattr(face, name)


class DilatedCLI(LightningCLI):
    """LightningCLI with any DilatedModule as model and any LightningDataModule as data, both by `class_path`.

    The optimizer is set in `model.init_args.optimizer`; a top-level one would get parameters that are replaced later.
    """

    def __init__(self, **kwargs: Any) -> None:
        import_public_classes()
        super().__init__(
            model_class=DilatedModule,
            datamodule_class=pl.LightningDataModule,
            trainer_class=Trainer,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            save_config_kwargs={"overwrite": True},
            parser_class=Parser,
            parser_kwargs={"prog": PROG},
            **kwargs,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Set the default data: Python's source code."""
        if not dict(settings(sys.argv[1:])).get(("data",)):  # another class must not get the default's arguments
            parser.set_defaults({"data": {"class_path": "lightning_dilated.data.ByteDataModule"}})

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Prepare only the requested command's parser, because the options of other commands are never read."""
        requested = sys.argv[1:2]
        if requested == [subcommand] or not set(requested) & set(self.subcommands()):
            return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        self._subcommand_method_arguments[subcommand] = []
        return self.init_parser(**kwargs)

    def parse_arguments(self, parser: LightningArgumentParser, args: list[str] | None) -> None:
        """Parse the recipes, the checkpoint's settings and the options, in this order."""
        with one_line_errors():
            words = with_parts(with_checkpoint(sys.argv[1:]) if args is None else args)
        self.config = parser.parse_args(words)

    def _parse_ckpt_path(self) -> None:
        """Do nothing, because `parse_arguments` has already read the checkpoint."""

    def before_instantiate_classes(self) -> None:
        """Set the model's `max_seq_len` to the data's sequence length if no recipe sets it; see `with_length`."""
        config = self.config.get(str(self.subcommand), self.config)
        model, data = config.model, config.data.get("init_args") or {}
        with contextlib.suppress(ValueError):  # the parser will report a class that cannot be imported
            cls = class_of(Path("the recipe"), model.class_path, "lightning_dilated")
            length = with_length(cls, vars(model.init_args), data.get("seq_len")).get("max_seq_len")
            if length is not None and "max_seq_len" in model.init_args:
                model.init_args["max_seq_len"] = length

    def instantiate_classes(self) -> None:
        """Make model, data and trainer, and check the data; report wrong values in one line before any work."""
        with one_line_errors():
            super().instantiate_classes()
            self.check_data()

    def check_data(self) -> None:
        """Run the data's own checks, and refuse ByteDataModule for a model that takes other inputs.

        Except in fit, the data takes the label classes from the checkpoint, because the data may lack some of them.
        """
        dims = getattr(self.model.sequence_spec, "dims", None)  # None if the spec is missing
        is_text = type(self.datamodule) is ByteDataModule  # subclasses may have other batches
        labelled = self.model.predicts_label and self.subcommand != "predict"
        path = self.config[str(self.subcommand)].get("ckpt_path")
        if is_text and dims is not None and ("tokens" not in dims or labelled):
            raise ValueError(_other_data(self.model, dims) + _recipe_of_run(path))
        names_data = any(word.startswith(("--config", "-c", "--data")) for word in sys.argv[2:])
        if is_text and not names_data and (hint := _recipe_of_run(path)):
            rank_zero_warn(f"the data is the default, Python's own source.{hint}")
        follow = getattr(self.datamodule, "follow_classes", None)
        if self.subcommand != "fit" and callable(follow) and path and Path(path).is_file():
            follow(read_checkpoint(path).get("classes"))
        check = getattr(self.datamodule, "check", None)
        if callable(check):
            check()

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Make the trainer, with this package's model table and progress bar instead of Lightning's.

        Add PredictionWriter for `predict`, and BootstrapIntervals for `test` of a classifier, if the recipe has none.
        """
        trainer = super().instantiate_trainer(**kwargs)
        config = self.config.get(str(self.subcommand), self.config)  # without subcommands, the whole config
        if "ModelSummary" not in str(config.trainer.callbacks):
            trainer.callbacks = [hook("model table")() if isinstance(c, ModelSummary) else c for c in trainer.callbacks]
        if "RichProgressBar" not in str(config.trainer.callbacks):  # Lightning's default
            trainer.callbacks = [MetricsProgressBar() if type(c) is RichProgressBar else c for c in trainer.callbacks]
        writers = [c for c in trainer.callbacks if isinstance(c, BasePredictionWriter)]
        if self.subcommand == "predict" and self.model.predicts_rows and not writers:
            trainer.callbacks.append(PredictionWriter())
        if self.subcommand == "test" and self.model.predicts_label and self.model.task is not None:
            has_intervals = any(isinstance(c, callbacks.BootstrapIntervals) for c in trainer.callbacks)
            trainer.callbacks += [] if has_intervals else [callbacks.BootstrapIntervals()]
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        """Run the command; print an error before the first step in one line, as for a wrong setting."""
        path = self.config[subcommand].get("ckpt_path")
        resumed = bool(path) and Path(path).is_file()
        steps_before = read_checkpoint(path).get("global_step", 0) if resumed else 0
        try:
            super()._run_subcommand(subcommand)
        except (ValueError, OSError, ModuleNotFoundError, MisconfigurationException) as error:
            if wants_traceback() or self.trainer.global_step > steps_before:
                raise
            fail(f"{summarize_error(str(error))}\n(LIGHTNING_DILATED_TRACEBACK=1 shows where this was noticed.)")
        except RuntimeError as error:
            if wants_traceback() or not resumed or "loading state_dict" not in str(error):
                raise
            fail(f"ckpt_path {path} does not fit this model.{self._differences(path)}\n  {summarize_error(str(error))}")

    def _differences(self, path: str) -> str:
        stored, current = read_checkpoint(path).get("hyper_parameters", {}), self.model.hparams
        differences = [
            f"{k} is {stored[k]!r} there and {current[k]!r} here"
            for k in stored
            if k in current and stored[k] != current[k]
        ]
        return f" {'; '.join(differences)}." if differences else ""


def run_recipe(ckpt_path: Any) -> Path | None:
    """Return the config.yaml of a checkpoint's run, in the file's folder or up to two folders above; else None."""
    folders = list(Path(str(ckpt_path)).parents)[:3] if ckpt_path and Path(str(ckpt_path)).is_file() else []
    return next((folder / "config.yaml" for folder in folders if (folder / "config.yaml").is_file()), None)


def _recipe_of_run(ckpt_path: Any) -> str:
    recipe = run_recipe(ckpt_path)
    return "" if recipe is None else f" The checkpoint's run had the settings in {recipe}: add --config {recipe}."


def _other_data(model: DilatedModule, dims: Mapping[str, int]) -> str:
    """Return the error message for a ByteDataModule with a model that takes other inputs."""
    entries = ", ".join([*dims, *(["label"] if model.predicts_label else [])])
    return (
        f"the data is a ByteDataModule, which is the one where `data` names no class_path: bytes of texts as tokens and "
        f"labels. A {type(model).__name__} takes {entries}. Set data.class_path to a LightningDataModule that brings them: "
        "lightning_dilated.data.SlideDataModule for slides, else one of your own."
    )
