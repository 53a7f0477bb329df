"""The LightningCLI of fit, validate, test and predict: any DilatedModule, any LightningDataModule."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_dilated.callbacks import PredictionWriter
from lightning_dilated.cli.arguments import names_data
from lightning_dilated.cli.errors import PROG, essence, fail, one_line_errors, wants_traceback
from lightning_dilated.cli.explain import class_of, with_length
from lightning_dilated.cli.load_model import read_checkpoint
from lightning_dilated.data import ByteDataModule
from lightning_dilated.models import DilatedModule, TokenModel
from lightning_dilated.models.pooled_model import PooledModule


class Parser(LightningArgumentParser):
    """A parser whose complaints fit on a screen: what is wrong, without a page of options above it."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the essence and stop."""
        if not self.exit_on_error or wants_traceback():
            super().error(message, ex)
        fail(f"{essence(message)}\n`{PROG} {' '.join(sys.argv[1:2])} --help` lists all keys.")


class DilatedCLI(LightningCLI):
    """LightningCLI whose model is any DilatedModule and whose data any LightningDataModule, both by `class_path`.

    Optimizers belong to the model (`model.init_args.optimizer`): a top-level `optimizer:` would be built before the
    parameters are final, and then train nothing.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            model_class=DilatedModule,
            datamodule_class=pl.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            save_config_kwargs={"overwrite": True},
            parser_class=Parser,
            parser_kwargs={"prog": PROG},
            **kwargs,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The data is Python's own source unless something else is named."""
        if not names_data(sys.argv[2:]):  # else its defaults would become those of the class that is named
            parser.set_defaults({"data": {"class_path": "lightning_dilated.data.ByteDataModule"}})

    def _parse_ckpt_path(self) -> None:
        """Nothing: `with_checkpoint` has put the checkpoint's settings between the recipe's and the command line's."""

    def before_instantiate_classes(self) -> None:
        """A model whose recipe says nothing of its positions is made for sequences as long as the data's."""
        config = self.config.get(str(self.subcommand), self.config)
        model, data = config.model, config.data.get("init_args") or {}
        with contextlib.suppress(ValueError):  # a class that cannot be imported is the parser's to report
            cls = class_of(Path("the recipe"), model.class_path, "lightning_dilated")
            length = with_length(cls, vars(model.init_args), data.get("seq_len")).get("max_seq_len")
            if length is not None and "max_seq_len" in model.init_args:
                model.init_args["max_seq_len"] = length

    def instantiate_classes(self) -> None:
        """Build model, data and trainer; a wrong value is one line, before any work."""
        with one_line_errors():
            super().instantiate_classes()
            self.check_data()

    def check_data(self) -> None:
        """Let the data say what is wrong with them, and see that a text's bytes are what the model takes."""
        taken = getattr(self.model.sequence_spec, "dims", None)  # None: a model that does not say
        texts = type(self.datamodule) is ByteDataModule  # a subclass of one's own may bring anything
        labelled = isinstance(self.model, PooledModule) and self.subcommand != "predict"
        if texts and taken is not None and ("tokens" not in taken or labelled):
            raise ValueError(_other_data(self.model, taken))
        check = getattr(self.datamodule, "check", None)
        if callable(check):
            check()

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Lightning's, with a writer for what our models predict unless the recipe has one."""
        trainer = super().instantiate_trainer(**kwargs)
        writers = [c for c in trainer.callbacks if isinstance(c, BasePredictionWriter)]
        ours = isinstance(self.model, (TokenModel, PooledModule))
        if self.subcommand == "predict" and ours and not writers:
            trainer.callbacks.append(PredictionWriter())
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        """Run; what is noticed before the first step is a wrong setting too, and one line."""
        path = self.config[subcommand].get("ckpt_path")
        resumed = bool(path) and Path(path).is_file()
        before = read_checkpoint(path).get("global_step", 0) if resumed else 0
        try:
            super()._run_subcommand(subcommand)
        except (ValueError, OSError, MisconfigurationException) as error:
            if wants_traceback() or self.trainer.global_step > before:
                raise
            fail(f"{essence(str(error))}\n(LIGHTNING_DILATED_TRACEBACK=1 shows where this was noticed.)")
        except RuntimeError as error:
            if wants_traceback() or not resumed or "loading state_dict" not in str(error):
                raise
            fail(f"ckpt_path {path} does not fit this model.{self._differences(path)}\n  {essence(str(error))}")

    def _differences(self, path: str) -> str:
        """The hyperparameters that a checkpoint has otherwise."""
        there, here = read_checkpoint(path).get("hyper_parameters", {}), self.model.hparams
        found = [f"{k} is {there[k]!r} there and {here[k]!r} here" for k in there if k in here and there[k] != here[k]]
        return f" {'; '.join(found)}." if found else ""


def _other_data(model: DilatedModule, taken: Mapping[str, int]) -> str:
    """What to do about bytes of a text under a model of something else."""
    entries = ", ".join([*taken, *(["label"] if isinstance(model, PooledModule) else [])])
    return (
        f"the data is a ByteDataModule, which is the one where `data` names no class_path: bytes of texts as tokens and "
        f"labels. A {type(model).__name__} takes {entries}. Set data.class_path to a LightningDataModule that brings them: "
        "lightning_dilated.data.SlideDataModule for slides, else one of your own."
    )
