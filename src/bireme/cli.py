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
from bireme.environment import Launch
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
        negative = "" if each.name == "inject" else None  # no --empty-inject
        option = Parameter(name=names, help=help_text, show_default=default is not None, negative=negative)
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
    directory, world = run_training(lambda base: load_config(config, overrides, base))
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


@app.command(name="run")
def run_script(
    *words: str,
    run_dir: Annotated[Path | None, Parameter(name=("--run-dir", "--run"))] = None,
    module: Annotated[bool, Parameter(name=("--module", "-m"), negative="")] = False,
    tokens_per_step: int = 0,
    flops_per_token: float | None = None,
    skip_steps: int = 3,
    stall_after: float = 30.0,
    metrics_port: int | None = None,
    trace_steps: str = "",
) -> int:
    """Run a training script as it is, and account for the steps of its optimizer.

    bireme run train.py --its --own arguments
    torchrun --nproc-per-node 2 -m bireme run train.py --its --own arguments

    The script gets everything behind its name. Nothing of it changes; what is observed begins with the second step.

    Parameters
    ----------
    words
        The script, and its arguments.
    run_dir
        Run directory, by default runs/<UTC time>-<id>.
    module
        It is a module, as in python -m.
    tokens_per_step
        Distinct tokens that each rank trains on in a step: without, there are no tokens/s.
    flops_per_token
        FLOPs of one token, forward and backward: without, there is no MFU.
    skip_steps
        Warm-up steps kept out of averages.
    stall_after
        Say who keeps the others waiting when a rank has not moved for so many seconds; 0: never.
    metrics_port
        Rank 0 serves Prometheus metrics on this port of the loopback interface.
    trace_steps
        Steps to keep every span of, as in 20:22.
    """
    from bireme.run_script import default_options, run_command

    options = default_options(
        run_dir,
        tokens_per_step=tokens_per_step,
        flops_per_token=flops_per_token,
        skip_steps=skip_steps,
        stall_after_s=stall_after,
        metrics_port=metrics_port,
        trace_steps=trace_steps,
    )
    return run_command(list(words), module, options)


@app.command
def report(
    *runs: Path,
    json: bool = False,
    links: Path | None = None,
    html: bool = False,
    out: Path | None = None,
    open: bool = False,
) -> None:
    """Show where the time of a run went; with two runs, side by side.

    Parameters
    ----------
    runs
        One run directory, or two to compare; with --html also the folder of a study.
    json
        Print one JSON object instead (docs/run-directory.md).
    links
        What `bireme links` measured of the same ranks: the run's transfers are held against it.
    html
        Write one self-contained page instead, and print its path (docs/report.md).
    out
        The page's file; if not given, report.html in the run's directory, or report-against-A.html in B's.
    open
        Open the page in a browser.
    """
    from bireme.report import report_command

    report_command(list(runs), json, links, html, out, open)


@app.command
def watch(run: Path, /, *, every: float = 1.0, once: bool = False) -> int:
    """Follow a run while it goes on: step, loss, tokens/s, MFU, where the time goes, verdicts, events.

    Where the output is no terminal: plain lines, until the run has ended; exit code 1 when it failed.

    Parameters
    ----------
    run
        Run directory; also one that is still empty, or that is being copied.
    every
        Seconds between two looks.
    once
        Print what there is now, and end.
    """
    from bireme.watch import watch_command

    return watch_command(run, every, once)


export = cyclopts.App(
    name="export",
    help="Write a run in the formats of other tools.",
    help_format="plaintext",
    result_action="return_value",
)
app.command(export)


@export.command(name="trace")
def export_trace(run: Path, /, *, steps: str | None = None, out: Path | None = None) -> None:
    """Write the steps that were traced (--trace-steps) as a Chrome trace, all ranks on one clock.

    It opens in ui.perfetto.dev and in chrome://tracing. docs/trace.md says what it shows.

    Parameters
    ----------
    run
        Run directory.
    steps
        Only these of them, as in 20:21.
    out
        File to write, compressed where its name ends in .gz; trace.json in the run's directory if not given.
    """
    from bireme.report.trace import trace_command

    trace_command(run, steps, out)


@export.command(name="csv")
def export_csv(run: Path, /, *, out: Path | None = None) -> None:
    """Write the ledger as CSV: one line for each step and rank (docs/metrics.md).

    Parameters
    ----------
    run
        Run directory.
    out
        File to write; standard output if not given.
    """
    from bireme.report.csv_export import csv_command

    csv_command(run, out)


@app.command
def nodes(
    *command: str,
    nodes: int = 2,
    link: str = "1gbit",
    cores_per_node: int | None = None,
    delay: str | None = None,
    torchrun: str | None = None,
) -> int:
    """Run a command on every node of an emulated cluster: machines with their own network card, on real limited links.

    bireme nodes --nodes 2 --link 1gbit -- hostname
    bireme nodes --nodes 2 --link 1gbit --torchrun 1 -- -m bireme train --preset toy

    Parameters
    ----------
    command
        After `--`: the command, run on every node at once; with --torchrun, what torchrun is to start.
    nodes
        Number of machines.
    link
        Rate of every node's network card, both ways, as in 100mbit, 1gbit, 2.5gbit; or unlimited.
    cores_per_node
        Cores that each node is pinned to; not given, the cores here are shared out.
    delay
        Added one-way delay between two nodes, as in 1ms, where the kernel has netem.
    torchrun
        Start torchrun with this many ranks on each node: 2, or 1,2 for unequal nodes.
    """
    from bireme.nodes_command import nodes_command

    return nodes_command(list(command), nodes, link, cores_per_node, delay, torchrun)


@app.command
def links(
    *,
    max_bytes: str = "64MiB",
    seconds: float = 30.0,
    out: Path = Path("links.json"),
    read: Path | None = None,
    brief: bool = False,
    json: bool = False,
    device: str = "auto",
) -> None:
    """Measure the collectives between ranks and nodes: time, rate, and which pair of nodes is slow.

    bireme nodes --nodes 2 --link 1gbit -- bireme links
    torchrun --nproc-per-node 2 -m bireme links

    Parameters
    ----------
    max_bytes
        Largest message, as in 8MiB; the smallest is 1 KiB.
    seconds
        Time for all measurements together. What is not reached by then is shown as n/a.
    out
        File for the measured table; it is replaced, and a picture is drawn beside it.
    read
        Show a file that was measured before instead.
    brief
        Two lines instead of tables: the largest all-reduce, and slow pairs if there are any.
    json
        Print one JSON object instead of tables (docs/links.md).
    device
        auto (GPUs where there are any), cpu or cuda.
    """
    _wait_without_spinning()
    from bireme.link_command import links_command

    links_command(max_bytes, seconds, out, read, json, device, brief)


@app.command
def parity(
    *,
    layout: Annotated[list[str] | None, Parameter(consume_multiple=True, negative="")] = None,
    steps: int = 5,
    quick: bool = False,
    json: bool = False,
) -> int:
    """Does every layout compute what one process computes? Losses, gradients and norms, step by step.

    torchrun --nproc-per-node 4 -m bireme parity

    Exit code 1 when a layout differs. On the CPU, in fp32; which layouts there are depends on the number of ranks.

    Parameters
    ----------
    layout
        Only these: ddp, fsdp, hsdp, tp, pp, or sizes such as pp=2,replicate=2. Not given, all that the ranks allow.
    steps
        Optimizer steps to compare.
    quick
        Fewer variants of each layout.
    json
        Print one JSON object instead of the table (docs/parity.md).
    """
    _wait_without_spinning()
    from bireme.parity_command import parity_command

    return parity_command(layout, steps, quick, json)


@app.command
def doctor(
    *,
    peers: str | None = None,
    port: int | None = None,
    ranks_per_node: int | None = None,
    workers: int = 0,
    wait: float | None = None,
    brief: bool = False,
    json: bool = False,
) -> int:
    """Will this cluster start, and will it be fast? Run it on one machine, or on every node at once.

    bireme nodes --nodes 2 -- bireme doctor
    bireme doctor --peers node0,node1        (the same on every node)

    Exit code 1 when a check fails. Under torchrun and srun it finds the other nodes by itself.

    Parameters
    ----------
    peers
        The nodes, in the same order on each; the first is where the others will meet. Not needed under a launcher.
    port
        Port of the meeting point that training will use; 29500 unless the environment says otherwise.
    ranks_per_node
        Ranks that will be started on each node; not given, what the launcher says, or one for each GPU.
    workers
        Data loader workers of each rank.
    wait
        Seconds to wait for the other nodes; not given, it ends within 15 seconds in all.
    brief
        Two lines instead of the whole report.
    json
        Print one JSON object instead (docs/doctor.md).
    """
    from bireme.doctor import doctor_command

    return doctor_command(peers, port, ranks_per_node, workers, json, brief, wait)


@app.command
def study(
    name: str,
    /,
    *,
    out: Path | None = None,
    nodes: int = 2,
    cores_per_node: int | None = None,
    link: str | None = None,
    ranks: str | None = None,
    links: str | None = None,
    delays: str | None = None,
    phase: str | None = None,
    layouts: str | None = None,
    preset: str | None = None,
    model: str | None = None,
    batch_per_rank: int | None = None,
    sequence_length: int | None = None,
    steps: int | None = None,
    json: bool = False,
) -> int:
    """Run a named experiment on emulated nodes over a grid, and show its table and picture.

    The experiments: ranks, straggler, links, layouts.

    bireme study links --links 100mbit,1gbit

    Parameters
    ----------
    name
        ranks: one to many; straggler: one rank made slow; links: several link rates; layouts: ways to spread a model.
    out
        Folder of the study; runs/study-NAME if not given. A study that was stopped goes on where it was.
    nodes
        Emulated nodes.
    cores_per_node
        Cores that each node is pinned to; not given, the cores here are shared out.
    link
        Rate of every link where the study does not vary it; 1gbit if not given.
    ranks
        Ranks on each node: a list, as in 1,2, in the studies of ranks and layouts, elsewhere one number.
    links
        Link rates of the study of links, 100mbit,200mbit,1gbit,unlimited if not given; of layouts, 200mbit,1gbit.
    delays
        Delays of the study of straggler in milliseconds, which take turns; 0,50,100,150,200 if not given.
    phase
        Where the straggler sleeps: input, forward, backward or optimizer; forward if not given.
    layouts
        Layouts of the study of layouts; ddp,fsdp,hsdp,tp,pp if not given. Sizes stand between semicolons, as in
        'ddp,fsdp;pp=2,shard=2'.
    preset
        Model shape by name; toy if not given, in the study of layouts a wider and deeper one (docs/studies.md).
    model
        Sizes that differ from the preset's, as in num_layers=8,embedding_dim=256.
    batch_per_rank
        Sequences per step on each rank; 8 if not given, 2 in the study of layouts.
    sequence_length
        Tokens per sequence; the model's context if not given, 64 in the study of layouts.
    steps
        Measured steps of each cell, 20 if not given, 6 in the study of layouts; of each delay in that of straggler.
    json
        Print one JSON object instead of the table (docs/studies.md).
    """
    from bireme.study.command import study_command
    from bireme.study.grid import Options

    options = Options(
        nodes=nodes,
        cores_per_node=cores_per_node,
        link=link,
        ranks=ranks,
        links=links,
        delays=delays,
        phase=phase,
        layouts=layouts,
        preset=preset,
        model=model,
        batch_per_rank=batch_per_rank,
        sequence_length=sequence_length,
        steps=steps,
    )
    return study_command(name, options, out, json)


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


data = cyclopts.App(
    name="data",
    help="Prepare text for training, and check what was prepared.",
    help_format="plaintext",
    result_action="return_value",
)
app.command(data)


@data.command(name="prepare")
def data_prepare(
    *sources: str,
    out: Path,
    tokenizer: str = "bytes",
    tokenizer_pattern: str | None = None,
    text_field: str = "text",
    workers: int | None = None,
    shard_megabytes: float | None = None,
) -> None:
    """Turn text into token files: text, JSON lines (.jsonl) and Parquet files, or folders of them; also .gz.

    bireme data prepare corpus/ --out tokens/ --tokenizer tokenizer.json
    bireme train --data tokens/

    Stopped at any moment, it goes on where it was when it is started again. Nothing is downloaded. docs/data.md says
    what the folder holds.

    Parameters
    ----------
    sources
        Files and folders; or stdlib, the sources of Python's standard library.
    out
        Folder to write: new, empty, or an unfinished one of the same preparation.
    tokenizer
        bytes, or the path of a Hugging Face tokenizer.json, or of a tiktoken file (also Llama 3's tokenizer.model).
    tokenizer_pattern
        How a tiktoken file splits text, where its name does not say: gpt2, r50k_base, p50k_base, cl100k_base,
        o200k_base or llama3.
    text_field
        Field of JSON lines, or column of Parquet, that holds the text.
    workers
        Processes; not given, one for each usable core. The result does not depend on it.
    shard_megabytes
        Source text in each token file; not given, 128, or less for less text.
    """
    from bireme.data.command import prepare_command

    prepare_command(list(sources), out, tokenizer, tokenizer_pattern, text_field, workers, shard_megabytes)


@data.command(name="verify")
def data_verify(path: Path, /) -> int:
    """Read all that was prepared and check it; exit code 1 when something is damaged.

    Parameters
    ----------
    path
        A prepared folder, or one token file.
    """
    from bireme.data.command import verify_command

    return verify_command(path)


checkpoint = cyclopts.App(
    name="checkpoint",
    help="List, check and export the checkpoints of a run.",
    help_format="plaintext",
    result_action="return_value",
)
app.command(checkpoint)


@checkpoint.command(name="list")
def checkpoint_list(run: Path, /, *, json: bool = False) -> None:
    """Show the checkpoints of a run, newest first: what they are of, and whether they look whole.

    Parameters
    ----------
    run
        Run directory, or its folder of checkpoints.
    json
        Print one JSON object instead of the table (docs/checkpoints.md).
    """
    from bireme.checkpoint.command import list_command

    list_command(run, json)


@checkpoint.command(name="verify")
def checkpoint_verify(path: Path, /, *, json: bool = False) -> int:
    """Read every file of checkpoints and hold it against its checksum; exit code 1 when one is damaged.

    Parameters
    ----------
    path
        Run directory, its folder of checkpoints, or one checkpoint.
    json
        Print one JSON object instead (docs/checkpoints.md).
    """
    from bireme.checkpoint.command import verify_command

    return verify_command(path, json)


@checkpoint.command(name="export")
def checkpoint_export(path: Path, /, *, out: Path = Path("model.safetensors"), step: int | None = None) -> None:
    """Write the model of a checkpoint as one safetensors file, with a JSON file that describes it beside it.

    bireme checkpoint export runs/first --out exported/model.safetensors
    bireme sample exported

    examples/load_exported.py loads it without bireme's trainer, in one process.

    Parameters
    ----------
    path
        Run directory, of which the newest whole checkpoint is taken, or one checkpoint.
    out
        File to write; one that exists is refused.
    step
        Take the checkpoint of this step.
    """
    from bireme.checkpoint.command import export_command

    export_command(path, out, step)


def _parse(app: cyclopts.App, arguments: Sequence[str]) -> tuple[Callable[..., Any], inspect.BoundArguments]:
    """The verb and its arguments; UserError, on one line, for what does not parse."""
    if arguments[:1] == ["nodes"] and not {"--", "--help", "-h"} & set(arguments):
        raise UserError("put -- before the command: bireme nodes --nodes 2 --link 1gbit -- COMMAND...")
    try:
        command, bound, _ = app.parse_args(arguments, print_error=False, exit_on_error=False)
    except cyclopts.UnknownOptionError as error:
        option = error.token.keyword or error.token.value
        known = [f"--{each.name.replace('_', '-')}" for each in fields(TrainConfig)] if "train" in arguments[:1] else []
        raise UserError(f"unknown option {option}{nearest(option, known)}; --help lists the options") from None
    except cyclopts.CycloptsError as error:
        raise UserError(" ".join(str(error).split())) from None
    return command, bound


def _script_apart(arguments: Sequence[str]) -> list[str]:
    """Of `bireme run`: what follows the script's name is the script's, options too."""
    flags = {"-m", "--module", "--help", "-h"}
    index = 1
    while index < len(arguments) and arguments[index].startswith("-") and arguments[index] != "--":
        index += 1 if arguments[index] in flags or "=" in arguments[index] else 2
    if arguments[index : index + 1] in (["--"], []):
        return list(arguments)
    return [*arguments[:index], "--", *arguments[index:]]


def _rank() -> int:
    """This process's rank; 0 where the environment does not say."""
    try:
        return Launch.from_environment(os.environ).rank
    except UserError:
        return 0


def run(app: cyclopts.App, arguments: Sequence[str]) -> int:
    """Runs a program; returns the exit code. A user's mistake is one line on standard error, and 2."""
    try:
        command, bound = _parse(app, _script_apart(arguments) if arguments[:1] == ["run"] else arguments)
        exit_code = command(*bound.args, **bound.kwargs)
        if sys.stdout is not None:  # closed by the caller's shell
            sys.stdout.flush()
    except UserError as error:
        if not getattr(error, "shown_by_rank_0", False) or _rank() == 0:
            # What is quoted may come from a foreign file: nothing in it may drive the terminal.
            print(re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", f"bireme: {error}"), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as stopped:
        return getattr(stopped, "exit_code", 130)
    except BrokenPipeError:  # `bireme report RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            print(f"bireme: {error.strerror}: allow more, with ulimit -n 1024", file=sys.stderr)
            return 2
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF) or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(f"bireme: cannot write the output: {error.strerror or error}", file=sys.stderr)
        return 1
    return exit_code if isinstance(exit_code, int) else 0


def main() -> int:
    """The `bireme` command."""
    return run(app, sys.argv[1:])
