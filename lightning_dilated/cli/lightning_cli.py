"""LightningCLI for fit, validate, test and predict: any DilatedModule and LightningDataModule, recipes by name, and a
checkpoint's model settings between those of the recipe and of the command line."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks import BasePredictionWriter, ModelSummary, RichProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import lightning_dilated
from lightning_dilated import callbacks
from lightning_dilated._compat.lightning import argument_types
from lightning_dilated.callbacks import MetricsProgressBar, PredictionWriter
from lightning_dilated.callbacks.model_table import ModelTable
from lightning_dilated.cli.errors import PROG, essence, fail, one_line_errors, wants_traceback
from lightning_dilated.cli.load_model import read_checkpoint, stored_class
from lightning_dilated.cli.parsing import Parser
from lightning_dilated.cli.parsing.parser import check_texts
from lightning_dilated.cli.recipe import class_of, with_length
from lightning_dilated.data import ByteDataModule
from lightning_dilated.models import DilatedModule
from lightning_dilated.models.module import stored_hparams
from lightning_dilated.models.pretrained import file_arguments, imported
from lightning_dilated.strategy import launched_nodes

#: keywords that Lightning itself understands in place of a path
CKPT_WORDS = ("best", "last", "hpc", "registry")


def with_checkpoint(argv: list[str]) -> list[str]:
    """The arguments in the order recipe, settings of the model in --ckpt_path, everything else: the later one wins."""
    if any(re.match(r"(-h|--help|--[\w.]+\.help)(=|$)|--print_config", word) for word in argv):
        return argv
    configs, rest = split_configs(argv[1:])
    class_name = model_class(configs, rest)
    in_configs = (c["ckpt_path"] for c in reversed(read(configs)) if c.get("ckpt_path"))
    path = option(argv, "--ckpt_path") or next(in_configs, None)
    is_folder = path is not None and Path(path).is_dir()
    if path is None or path in CKPT_WORDS or is_folder:
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
    return [argv[0], *configs, *checkpoint_settings(path, class_name, model_arguments(configs, rest)), *rest]


def with_parts(argv: list[str]) -> list[str]:
    """The arguments; in place of each that sets a part of a mapping or list, such as --model.pattern.hybrid.local 128, the
    whole of it with that part changed. The parser alone would drop the other parts."""
    out: list[str] = []
    wholes: dict[tuple[str, str], Any] = {}
    words = iter(argv)
    for word in words:
        option, equals, text = word.partition("=")
        match = re.fullmatch(r"--(model|data)\.(?:init_args\.)?(\w+)((?:\.\w+)*)", option)
        is_config = option in ("--config", "-c")
        following = [] if equals or not (match or is_config) else [*itertools.islice(words, 1)]
        text = next(iter(following), text)
        if is_config:
            for config in read([text]):
                wholes |= _arguments(config)
        elif match:
            key, parts = (match[1], match[2]), match[3].split(".")[1:]
            whole = wholes.get(key, {} if key == ("model", "pattern") else None)
            if not parts:
                wholes[key] = _plain(text)
            elif isinstance(whole, dict | list) and "class_path" not in whole:
                wholes[key] = _with_part(copy.deepcopy(whole), parts, _plain(text), option)
                flow = yaml.safe_dump(wholes[key], default_flow_style=True, sort_keys=False, width=float("inf")).strip()
                word, following = f"{option.removesuffix(match[3])}={flow}", []
        out += [word, *following]
    return out


def _arguments(config: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """{(section, name): value} of the arguments of a recipe's model and data."""
    sections = ((section, config.get(section)) for section in ("model", "data"))
    arguments = ((section, x.get("init_args")) for section, x in sections if isinstance(x, dict))
    return {(section, name): value for section, x in arguments if isinstance(x, dict) for name, value in x.items()}


def _plain(text: str) -> Any:
    """The value of an option; text that is no YAML as it is."""
    with contextlib.suppress(yaml.YAMLError):
        return yaml.safe_load(text)
    return text


def _with_part(whole: Any, keys: list[str], value: Any, option: str) -> Any:
    """A mapping or list, in which the part that the keys lead to has this value."""
    part = whole
    for i, key in enumerate(keys):
        name = ".".join([option.removesuffix("." + ".".join(keys)), *keys[:i]])
        place: Any = next((x for x in part if str(x) == key), key) if isinstance(part, dict) else key
        if isinstance(part, list):
            if not key.isdecimal() or int(key) >= len(part):
                fail(f"{option}: {name} is a list, whose parts are called 0 to {len(part) - 1}; got {key!r}.")
            place = int(key)
        elif not isinstance(part, dict):
            fail(f"{option}: {name} is {part!r}, which has no parts. Set {name} itself.")
        if i == len(keys) - 1:
            part[place] = value
        elif isinstance(part, list) or part.get(place) is not None:
            part = part[place]
        else:
            part[place] = part = {}
    return whole


def checkpoint_settings(path: str, class_name: str | None, own: set[str]) -> list[str]:
    """The model of a checkpoint as arguments, without its training options, which are the recipe's.

    Args:
        path: of a .ckpt.
        class_name: the model's class in recipe and arguments; None takes the checkpoint's.
        own: arguments of the model that they name; they replace the checkpoint's where that are no plain values.
    """
    stored = read_checkpoint(path)
    named = stored_class(stored)
    if class_name is not None and named.rpartition(".")[2] != class_name.rpartition(".")[2]:
        fail(
            f"--ckpt_path {path} holds a {named}, but the recipe or --model names {class_name}. Use one class for both."
        )
    cls = imported(named) if class_name is None else _class_of_recipe(class_name)
    if class_name is None and not (isinstance(cls, type) and issubclass(cls, DilatedModule)):
        fail(
            f"--ckpt_path {path} names {named} (the model's class), which is no DilatedModule that is imported here, and "
            "files do not decide what is. If you trust it, name it in your own recipe or as --model, or import "
            f"{named.rpartition('.')[0]} before."
        )
    types = {} if cls is None else argument_types(cls)  # without a class the parser fails, and says why
    settings: dict[str, Any] = {}
    for name, value in stored_hparams(stored).items() if cls is not None else ():
        try:
            plain = file_arguments({name: value}, f"--ckpt_path {path}")
            check_texts(plain, types, f"--ckpt_path {path}")
        except ValueError as error:
            if name not in own:
                fail(error)
        else:
            settings |= plain
    arguments = [f"--model.{key}={x if isinstance(x, str) else json.dumps(x)}" for key, x in settings.items()]
    return arguments if class_name else [f"--model={named}", *arguments]


def _class_of_recipe(name: str) -> Any:
    """The class that a recipe or argument names, as a parser reads it; None where there is none."""
    with contextlib.suppress(ValueError):
        return class_of(Path("the recipe"), name, "lightning_dilated")
    todo: list[type] = [DilatedModule]
    while todo:
        cls = todo.pop()
        if cls.__name__ == name:
            return cls
        todo += cls.__subclasses__()
    return None


def model_class(configs: list[str], rest: list[str]) -> str | None:
    """The class that the recipes and arguments name for the model, the last one; None where none does."""
    name = "LongNetLM" if configs else None
    for config in read(configs):
        model = config.get("model")
        name = (model.get("class_path") if isinstance(model, dict) else model) or name
    for key in ("--model", "--model.class_path"):
        value = option(rest, key)
        if value is not None:
            name = value
    return name


def data_class(configs: list[str], rest: list[str]) -> str | None:
    """The class that the recipes and arguments name for the data, the last one; None where none does."""
    name = None
    for config in read(configs):
        data = config.get("data")
        name = (data.get("class_path") if isinstance(data, dict) else data) or name
    for key in ("--data", "--data.class_path"):
        name = option(rest, key) or name
    return name


def chosen_classes(argv: list[str]) -> dict[str, str | None]:
    """The classes of model and data that a command would take; None where nothing names a model."""
    configs, rest = split_configs(argv)
    return {
        "model": model_class(configs, rest),
        "data": data_class(configs, rest) or ("ByteDataModule" if configs else None),
    }


def model_arguments(configs: list[str], rest: list[str]) -> set[str]:
    """Names of the model's arguments in recipes and arguments."""
    models = [model for config in read(configs) if isinstance(model := config.get("model"), dict)]
    inner = [x for model in models if isinstance(x := model.get("init_args"), dict)]
    words = [match[1] for word in rest if (match := re.match(r"--model\.(?:init_args\.)?(\w+)", word))]
    names = {*words, *(str(name) for mapping in (*models, *inner) for name in mapping)}
    return names - {"class_path", "init_args"}


def read(configs: list[str]) -> list[dict[str, Any]]:
    """The mappings in config files; other files are left to the parser, which reports what is wrong with them."""
    mappings = []
    for word in configs:
        path = Path(word.partition("=")[2] or word)
        if path.is_file():
            with contextlib.suppress(yaml.YAMLError, UnicodeDecodeError):
                values = yaml.safe_load(path.read_text())
                mappings += [values] if isinstance(values, dict) else []
    return mappings


def split_configs(argv: list[str]) -> tuple[list[str], list[str]]:
    """(the --config arguments with their values, all others)."""
    configs, others, following = [], [], False
    for argument in argv:
        is_config = following or argument in ("--config", "-c") or argument.startswith(("--config=", "-c="))
        (configs if is_config else others).append(argument)
        following = argument in ("--config", "-c")
    return configs, others


def option(argv: list[str], name: str) -> str | None:
    """The last value of an option, in either spelling."""
    value = None
    for word, following in itertools.zip_longest(argv, argv[1:]):
        if word == name:
            value = following
        elif word.startswith(name + "="):
            value = word.removeprefix(name + "=")
    return value


def recipe_folders() -> list[Path]:
    """Folders of the package's recipes: inside the wheel, or next to the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return [f for f in (package / "recipes", package.parent / "recipes") if f.is_dir()]


def find_recipe(name: str) -> str:
    """The path of a config: as given, else the package's recipe of that file name."""
    if Path(name).is_file():
        return name
    in_package = Path(name).parent in (Path("."), Path("recipes"))  # a path in any other folder is taken literally
    for folder in recipe_folders():
        if in_package and (folder / Path(name).name).is_file():
            return str(folder / Path(name).name)
    known = sorted({f.name for folder in recipe_folders() for f in folder.glob("*.yaml")})
    fail(f"--config {name}: no such file, and no recipe of that name. Recipes: {', '.join(known)}.")


def with_recipes(argv: list[str]) -> list[str]:
    """The arguments, each --config replaced by the file it means."""
    out = list(argv)
    for i, word in enumerate(out):
        if word in ("--config", "-c") and i + 1 < len(out):
            out[i + 1] = find_recipe(out[i + 1])
        elif word.startswith(("--config=", "-c=")):
            out[i] = "--config=" + find_recipe(word.partition("=")[2])
    return out


class Trainer(pl.Trainer):
    """Lightning's Trainer.

    Args:
        num_nodes: number of nodes; "auto": as many as torchrun or SLURM started.
    """

    def __init__(self, *, num_nodes: int | Literal["auto"] = 1, **kwargs: Any) -> None:
        super().__init__(num_nodes=launched_nodes() if num_nodes == "auto" else num_nodes, **kwargs)


def import_public_classes() -> None:
    """Import the models, data and callbacks of this package, which a parser finds by their short names only then."""
    for face in (callbacks, lightning_dilated.data, lightning_dilated):
        for name in face.__all__:
            getattr(face, name)


class DilatedCLI(LightningCLI):
    """LightningCLI whose model is any DilatedModule and whose data any LightningDataModule, both by `class_path`.

    Optimizers belong to the model (`model.init_args.optimizer`): a top-level `optimizer:` would be built before the
    parameters are final, and then train nothing.
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
        """The default data is Python's source code."""
        if not data_class(*split_configs(sys.argv[2:])):  # else its defaults would become those of the named class
            parser.set_defaults({"data": {"class_path": "lightning_dilated.data.ByteDataModule"}})

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Lightning's for the requested command; options of the others are not read, so they are not built."""
        requested = sys.argv[1:2]
        if requested == [subcommand] or not set(requested) & set(self.subcommands()):
            return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        self._subcommand_method_arguments[subcommand] = []
        return self.init_parser(**kwargs)

    def _parse_ckpt_path(self) -> None:
        """Does nothing: `with_checkpoint` has put the checkpoint's settings between the recipe's and the command line's."""

    def before_instantiate_classes(self) -> None:
        """Without positions in the recipe, the model is made for sequences as long as the data's."""
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
        """Run the data's own checks, and check that a model of something else does not get bytes of texts.

        Data for a checkpoint takes the classes that the checkpoint was trained on, so that a cohort may lack some.
        """
        dims = getattr(self.model.sequence_spec, "dims", None)  # None for a model without dims
        is_text = type(self.datamodule) is ByteDataModule  # a subclass may have other batches
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
        """Add a writer for our models' predictions, and one for the metrics of a test, unless the recipe has one; and a
        short table of the model and our progress bar in place of Lightning's."""
        trainer = super().instantiate_trainer(**kwargs)
        config = self.config.get(str(self.subcommand), self.config)  # of a command of its own, all of it
        if "ModelSummary" not in str(config.trainer.callbacks):
            trainer.callbacks = [ModelTable() if isinstance(c, ModelSummary) else c for c in trainer.callbacks]
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
        """Run; an error before the first step is a wrong setting too, and one line."""
        path = self.config[subcommand].get("ckpt_path")
        resumed = bool(path) and Path(path).is_file()
        steps_before = read_checkpoint(path).get("global_step", 0) if resumed else 0
        try:
            super()._run_subcommand(subcommand)
        except (ValueError, OSError, ModuleNotFoundError, MisconfigurationException) as error:
            if wants_traceback() or self.trainer.global_step > steps_before:
                raise
            fail(f"{essence(str(error))}\n(LIGHTNING_DILATED_TRACEBACK=1 shows where this was noticed.)")
        except RuntimeError as error:
            if wants_traceback() or not resumed or "loading state_dict" not in str(error):
                raise
            fail(f"ckpt_path {path} does not fit this model.{self._differences(path)}\n  {essence(str(error))}")

    def _differences(self, path: str) -> str:
        """The hyperparameters that differ from the checkpoint's."""
        stored, current = read_checkpoint(path).get("hyper_parameters", {}), self.model.hparams
        differences = [
            f"{k} is {stored[k]!r} there and {current[k]!r} here"
            for k in stored
            if k in current and stored[k] != current[k]
        ]
        return f" {'; '.join(differences)}." if differences else ""


def run_recipe(ckpt_path: Any) -> Path | None:
    """The config.yaml of the run that wrote a checkpoint, next to it or up to two folders above; None without one."""
    folders = list(Path(str(ckpt_path)).parents)[:3] if ckpt_path and Path(str(ckpt_path)).is_file() else []
    return next((folder / "config.yaml" for folder in folders if (folder / "config.yaml").is_file()), None)


def _recipe_of_run(ckpt_path: Any) -> str:
    recipe = run_recipe(ckpt_path)
    return "" if recipe is None else f" The checkpoint's run had the settings in {recipe}: add --config {recipe}."


def _other_data(model: DilatedModule, dims: Mapping[str, int]) -> str:
    """What to do about bytes of a text under a model of something else."""
    entries = ", ".join([*dims, *(["label"] if model.predicts_label else [])])
    return (
        f"the data is a ByteDataModule, which is the one where `data` names no class_path: bytes of texts as tokens and "
        f"labels. A {type(model).__name__} takes {entries}. Set data.class_path to a LightningDataModule that brings them: "
        "lightning_dilated.data.SlideDataModule for slides, else one of your own."
    )
