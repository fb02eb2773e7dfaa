"""`bireme VERB`: parses the command line, and imports what a verb needs only when it runs."""

import errno
import inspect
import os
import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import cyclopts
from cyclopts import Parameter

from bireme import __version__
from bireme.config import TrainConfig, load_config
from bireme.errors import UserError, nearest

app = cyclopts.App(
    name="bireme",
    help="Multi-node PyTorch training that accounts for every millisecond of every step.",
    version=__version__,
    help_format="plaintext",
    result_action="return_value",
)


def _field_documents() -> dict[str, str]:
    """The string below each field of TrainConfig: its documentation."""
    from docstring_parser import parse_from_object

    return {each.arg_name: " ".join((each.description or "").split()) for each in parse_from_object(TrainConfig).params}


def _with_config_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a verb one option for each field of TrainConfig; only those on the command line are passed on."""
    hints = get_type_hints(TrainConfig)
    documents = _field_documents() if {"--help", "-h"} & set(sys.argv) else {}
    parameters = [
        inspect.Parameter(
            "config",
            inspect.Parameter.POSITIONAL_ONLY,
            default=None,
            annotation=Annotated[Path | None, Parameter(help="TOML file with any of the fields below.")],
        )
    ]
    for each in fields(TrainConfig):
        default = each.default if each.default is not MISSING else None
        help_text = documents.get(each.name, "")
        # torchrun on Python 3.11 takes a `--run` behind its script's name for its own `--run-path`, and refuses it.
        names = ("--run", "--run-dir") if each.name == "run" else None
        option = Parameter(name=names, help=help_text, show_default=default is not None)
        parameters.append(
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[hints[each.name], option],
            )
        )

    def call(config: Path | None = None, /, **overrides: Any) -> Any:
        return verb(config, overrides)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__doc__ = verb.__doc__
    call.__name__ = verb.__name__
    return call


@app.command
@_with_config_options
def train(config: Path | None, overrides: dict[str, Any]) -> None:
    """Train a GPT on every rank and leave a run directory.

    Under torchrun: torchrun --nproc-per-node 2 -m bireme train --preset toy. Without it: one process.
    STRAGGLER_MS (a delay in milliseconds, or a list that takes turns), STRAGGLER_RANK and STRAGGLER_PHASE in the
    environment make one rank slow on purpose.
    """
    _wait_without_spinning()
    from bireme.train import run_training

    if "model" in overrides:
        overrides["model"] = {name: _toml_value(text) for name, text in overrides["model"].items()}
    directory, world = run_training(lambda: load_config(config, overrides))
    if world.rank == 0:
        print(f"run directory: {directory}  (bireme report {directory})")


def _wait_without_spinning() -> None:
    """Before torch is loaded: OpenMP's threads spin while they wait, ten times slower where cores are shared, and
    spinning looks like computing."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _toml_value(text: str) -> Any:
    """The number, boolean or text that a --model.FIELD option means."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


@app.command
def report(*runs: Path, json: bool = False) -> None:
    """Show where the time of a run went; with two runs, side by side.

    Parameters
    ----------
    runs
        One run directory, or two to compare.
    json
        Print one JSON object instead (docs/run-directory.md).
    """
    from bireme.report import report_command

    report_command(list(runs), json)


@app.command
def sample(
    run: Path,
    /,
    *,
    prompt: str = "def ",
    num_tokens: int = 300,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> None:
    """Print text from the final weights of a run.

    Parameters
    ----------
    run
        Run directory.
    prompt
        Text to go on from.
    num_tokens
        Tokens to add to it.
    temperature
        0 always takes the likeliest token; 1 samples from the model's own distribution.
    top_k
        Sample from this many likeliest tokens only.
    seed
        The same seed gives the same text.
    """
    _wait_without_spinning()
    from bireme.sample import sample_run

    print(sample_run(run, prompt, num_tokens, temperature, top_k, seed))


def _parse(app: cyclopts.App, arguments: Sequence[str]) -> tuple[Callable[..., Any], inspect.BoundArguments]:
    """The verb and its arguments; UserError, on one line, for what does not parse."""
    try:
        command, bound, _ = app.parse_args(arguments, print_error=False, exit_on_error=False)
    except cyclopts.UnknownOptionError as error:
        option = error.token.keyword or error.token.value
        known = [f"--{each.name.replace('_', '-')}" for each in fields(TrainConfig)] if "train" in arguments[:1] else []
        raise UserError(f"unknown option {option}{nearest(option, known)}; --help lists the options") from None
    except cyclopts.CycloptsError as error:
        raise UserError(" ".join(str(error).split())) from None
    return command, bound


def run(app: cyclopts.App, arguments: Sequence[str]) -> int:
    """Runs a program; returns the exit code. A user's mistake is one line on standard error, and 2."""
    try:
        command, bound = _parse(app, arguments)
        command(*bound.args, **bound.kwargs)
        sys.stdout.flush()
    except UserError as error:
        if not getattr(error, "shown_by_rank_0", False) or os.environ.get("RANK", "0") == "0":
            # What is quoted may come from a foreign file: nothing in it may drive the terminal.
            print(re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", f"bireme: {error}"), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as stopped:
        return getattr(stopped, "exit_code", 130)
    except BrokenPipeError:  # `bireme report RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF) or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(f"bireme: cannot write the output: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    """The `bireme` command."""
    return run(app, sys.argv[1:])
