"""The training loop. `train` runs on every rank; what it needs is made first, then the loop reads top to bottom."""

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError

from bireme.channel import set_group_timeout
from bireme.checkpoint.folder import CHECKPOINTS
from bireme.checkpoint.resume import Resume, find_resume, is_done
from bireme.checkpoint.saver import RECORD_WITHIN_S, Saver, check_shared
from bireme.config import OF_A_START, TrainConfig
from bireme.console import RankLog, StepPrinter
from bireme.cores import usable_cores
from bireme.data.tokenizers import copy_tokenizer
from bireme.environment import Launch
from bireme.errors import SharedError, UserError
from bireme.facts import describe, headline, peak_of, where_groups_are
from bireme.guards import Checked, check_replicas, check_samples, check_start
from bireme.observe.collectives import process_groups
from bireme.observe.monitor import Monitor
from bireme.preemption import CommonStop
from bireme.record import default_run
from bireme.sample import WEIGHTS_FILE, save_weights
from bireme.shutdown import REQUEUE, Interrupted, StopRequest
from bireme.text import count, name_ranks
from bireme.trainer import Trainer
from bireme.world import World, join, peer_lost_in_one_line

log = logging.getLogger(__name__)

# What may differ from node to node.
_OF_A_NODE = ("data", "threads", *(each for each in OF_A_START if each != "inject"))

_TORCHRUN_GRACE_S = 30.0  # from SIGTERM to SIGKILL, unless told otherwise
_SAVE_WITHIN_S = 10.0  # for a save that is under way when training fails

Load = Callable[[Mapping[str, Any] | None], TrainConfig]


def run_training(load: Load) -> tuple[Path, World]:
    """What each rank's process does: joins the others, trains, leaves. Returns the run directory and who took part.

    `load` gives the configuration, on top of that of a run to go on with where there is one. What is wrong with it is
    said once for all ranks.
    """
    launch = Launch.from_environment(os.environ)
    config: TrainConfig | None = None
    problem: str | None = None
    try:
        config = load(None)
    except UserError as error:
        problem = str(error)
        if launch.size == 1:
            raise
    cuda = config is not None and config.device != "cpu" and torch.cuda.is_available()
    if config is not None and config.device == "cuda" and not cuda:
        problem = "device is cuda, but PyTorch sees no GPU here: use --device cpu"
    console = Console(highlight=False, soft_wrap=True)
    with RankLog(launch.rank, console) as rank_log:
        world = join("cuda" if cuda else "cpu")
        try:
            with peer_lost_in_one_line(world):
                world.raise_together(problem)
                assert config is not None
                resume = find_resume(config, world)
                if resume is not None:
                    with world.together():
                        config = load(resume.config)
                        done = is_done(resume, config.steps)
                    if done:
                        log.info("nothing is left to train: step %d of %d is made", resume.step, config.steps)
                        return Path(str(resume.run)), world
                config = _with_whole_path(config)
                try:
                    return train(config, world, console, rank_log, resume), world
                except Stopped as stopped:
                    if world.rank == 0:
                        console.print(stopped.farewell, markup=False)
                    world.channel.all_gather(None)  # the launcher ends all ranks when the first one leaves
                    raise
        finally:
            world.leave()


def _with_whole_path(config: TrainConfig) -> TrainConfig:
    """With the data's path in full: a run may go on from another working directory."""
    return replace(config, data=os.path.realpath(config.data)) if Path(config.data).exists() else config


class Stopped(Interrupted):
    """The run was asked to stop, and did so in order, on all ranks at once. `farewell`: what was saved."""

    def __init__(self, signal_number: int, exit_code: int | None, farewell: str):
        super().__init__(signal_number, exit_code)
        self.farewell = farewell


def train(
    config: TrainConfig,
    world: World,
    console: Console,
    rank_log: RankLog | None = None,
    resume: Resume | None = None,
) -> Path:
    """Trains on every rank of `world`; returns the run directory. Ends with an exception when it did not finish."""
    with ExitStack() as stack:
        if rank_log is None:
            rank_log = stack.enter_context(RankLog(world.rank, console))
        trainer, checked = _made(config, world, resume)
        stack.callback(trainer.loader.close)
        stack.callback(trainer.injector.close)
        if trainer.injections:  # of all ranks
            with world.together():
                trainer.injector.prepare()
        peak = peak_of(config, world)
        facts = describe(trainer, peak) | {"start_up_checks": checked.as_dict() if checked else None}
        printer: StepPrinter | None = None

        def on_steps(lines: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
            for event in events:
                if event["event"] == "warning":
                    rank_log.show_warning(event["message"], event["ranks"], world.size)
            for line in lines:
                if printer is not None:
                    printer.show(line)
            for event in events:
                if event["event"] == "verdict":
                    rank_log.show_verdict(event)

        request = stack.enter_context(StopRequest((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)))
        stop = CommonStop(request, world.size)
        directory = Path(world.channel.all_gather(config.run or default_run())[0])
        if config.checkpoint_every:
            check_shared(directory, world)
            if config.run is None and os.environ.get("TORCHELASTIC_RUN_ID", "none") != "none":
                log.warning("without --run-dir, a restart by the launcher could not go on with this run")
        monitor = Monitor(
            directory,
            facts=facts,
            channel=world.channel,
            exchange_every=config.exchange_every,
            skip_steps=config.skip_steps,
            on_steps=on_steps,
            warnings=rank_log.take_warnings,
            phases="explicit",
            device=world.device.type,
            first_step=trainer.first_step,
            resume=resume is not None and resume.run is not None,
            stall_after_s=config.stall_after,
            abort_after_s=config.abort_after,
            metrics_port=config.metrics_port,
            metrics_address=config.metrics_address,
            trace_steps=config.trace_steps,
        )
        request.on_stuck = lambda reason: monitor.close("interrupted", reason, within_s=3.0)
        with monitor:
            with world.together():
                _keep_with_the_run(trainer, directory, rank_log)
            _announce(trainer, facts, directory, checked)
            if world.rank == 0:
                flops, sum_of_peaks = facts["model"]["flops_per_token"]["full"], peak["flops_per_s"]
                printer = StepPrinter(
                    console,
                    config.steps,
                    lambda rate: rate * flops / sum_of_peaks if sum_of_peaks else None,
                    communication_known=not monitor.missing.get("collectives"),
                )
                stack.callback(printer.close)
            saver = Saver(
                directory / CHECKPOINTS,
                config.checkpoint_keep,
                config.checkpoint_keep_every,
                before_commit=lambda step: _record_first(monitor, step),
                note=_Note(monitor),
                resumed_after=resume.step if resume is not None and resume.run is not None else None,
                before_write=trainer.injector.before_write,
            )

            if trainer.silence_limit_s is not None:
                world.set_timeout(trainer.silence_limit_s)
                stop.set_timeout(trainer.silence_limit_s)
                for group in process_groups():
                    set_group_timeout(trainer.silence_limit_s, group)
            for planted in trainer.planted:
                monitor.event("injection", **planted)
            try:
                with peer_lost_in_one_line(world, request.check), trainer.collection:
                    loop(trainer, monitor, stop, saver)
                    request.finishing()
                    stop.close()
            except BaseException as error:
                monitor.failing(error)
                if type(error) is not KeyboardInterrupt:  # a second Ctrl-C waits for nothing
                    saver.wait(_SAVE_WITHIN_S)  # what is nearly written may be what the run goes on from
                raise
            with monitor.phase("checkpoint"):
                saver.wait()
        # After the last exchange: nobody waits for a slow disk, and nothing is measured any more.
        weights = trainer.parallel.whole_weights()
        if world.rank == 0:
            try:
                save_weights(weights, directory / WEIGHTS_FILE, trainer.model_config, trainer.tokens.tokenizer)
            except (OSError, SafetensorError) as error:
                raise UserError(f"cannot save the weights in {directory}: {error}") from None
        return directory


def _made(config: TrainConfig, world: World, resume: Resume | None) -> tuple[Trainer, Checked | None]:
    """Everything that is needed to train, checked; on every rank at once."""
    # Paths and threads may differ from node to node; whether the data are the same is seen below.
    world.agree({name: each for name, each in config.as_dict().items() if name not in _OF_A_NODE})
    _set_threads(config, world)
    with world.together():
        trainer = Trainer(config, world, resume)
    with world.together():
        trainer.load()
    if len(set(world.channel.all_gather(trainer.tokens.fingerprint))) > 1:
        raise SharedError(f"the ranks read different data: {config.data} is not the same on every node")
    trainer.parallelise()
    checked = check_start(trainer.parallel, world) if world.size > 1 else None
    trainer.restore()  # after the check of the initial weights
    check_samples(trainer.share, world)
    return trainer, checked


def _announce(trainer: Trainer, facts: dict[str, Any], directory: Path, checked: Checked | None) -> None:
    """The first lines on the console."""
    log.info("%s", headline(facts, directory))
    resume = trainer.resume
    for passed_over in resume.skipped if resume else []:
        log.warning("checkpoint %s: passed over", passed_over)
    if resume is not None and resume.folder is None:
        log.warning("%s ended before its first checkpoint: it begins again with step 1", directory)
    elif resume is not None:
        before = f"{count(resume.manifest['world_size'], 'rank')}, {resume.manifest['layout']}"
        log.info("goes on after step %d: %s, written by %s", resume.step, resume.folder, before)
    if checked is not None:
        log.info("%s", checked)
    for line in where_groups_are(trainer, facts):
        log.info("%s", line)
    for each in trainer.injections:
        over = "; its steps are over" if each.ends_before(trainer.first_step) else ""
        log.info("planted: %s (%s)%s", each.text, name_ranks(each.ranks), over)


def loop(trainer: Trainer, monitor: Monitor, stop: CommonStop, saver: Saver) -> None:
    """All steps of a run, each accounted for."""
    config = trainer.config
    # Distinct tokens: the ranks of one pipeline or tensor-parallel group see the same.
    share_of_batch = config.global_batch_size // trainer.layout.data_parallel_size
    tokens_per_rank = share_of_batch * trainer.length if trainer.parallel.mesh.counts_tokens else 0
    for number in range(trainer.first_step, config.steps + 1):
        if trainer.injector.leaves(number):
            break
        began = time.monotonic()
        if asked := stop.poll():
            raise _stopped(trainer, monitor, stop, saver, number - 1, asked)
        with monitor.step(tokens=tokens_per_rank) as step:
            trainer.train_step(number, monitor, step)
            if number == trainer.first_step and trainer.world.size > 1:
                step.skip("replica check")
                check_replicas(trainer.parallel, trainer.world.device, f"after step {number}")
            if config.evaluate_every and number % config.evaluate_every == 0:
                step.skip("evaluation")
                loss = trainer.evaluate(stop.poll, monitor.alive)
                if loss is not None:
                    step.record(evaluation_loss=loss)
                    monitor.event("evaluation", step=number, loss=loss)
            if config.checkpoint_every and (number % config.checkpoint_every == 0 or number == config.steps):
                # It may have to wait for a slow disk.
                with monitor.phase("checkpoint"), stop.patiently():
                    trainer.injector.enter("checkpoint")
                    saver.save(number, trainer.state(), trainer.manifest(number))
                monitor.hand_over(number)
            trainer.collection.after(number)
        stop.step_s = time.monotonic() - began


def _stopped(
    trainer: Trainer, monitor: Monitor, stop: CommonStop, saver: Saver, step: int, signal_number: int
) -> Stopped:
    """Saves the step that all ranks have just made, where it is not saved, and says how the run ends."""
    stop.close()
    with monitor.phase("checkpoint"):
        last = saver.wait()
    name = signal.Signals(signal_number).name
    if step < trainer.first_step:
        saved = trainer.resume is not None
        farewell = f"stopped by {name} before the first step" + (f"; step {step} is saved" if saved else "")
    else:
        if last is None or last.step != step or last.problem is not None:
            monitor.hand_over(step)
            with monitor.phase("checkpoint"):
                saver.save(step, trainer.state(), trainer.manifest(step))
                last = saver.wait()
        saved = last is not None and last.problem is None
        farewell = f"saved step {step}" if saved else f"step {step} is not saved: {last.problem if last else ''}"
    monitor.event("preempted", step=step, signal=name, saved=saved)
    exit_code = None if signal_number == signal.SIGINT else REQUEUE
    return Stopped(signal_number, exit_code, farewell)


def _keep_with_the_run(trainer: Trainer, directory: Path, rank_log: RankLog) -> None:
    """This rank's log, and on rank 0 what the model's tokens mean."""
    try:
        rank_log.open(directory)
        if trainer.world.rank == 0:
            copy_tokenizer(trainer.tokens, directory)
    except OSError as error:
        raise UserError(f"cannot write to {error.filename or directory}: {error.strerror}") from None


class _Note:
    """Passes events of the saver on, and says once when a launcher would not wait for a save."""

    def __init__(self, monitor: Monitor):
        self._monitor = monitor
        self._grace_s = float("inf")
        if "TORCHELASTIC_RUN_ID" in os.environ:
            given = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
            self._grace_s = float(given) if given.isdecimal() else _TORCHRUN_GRACE_S

    def __call__(self, event: str, **fields: Any) -> None:
        self._monitor.event(event, **fields)
        if event == "checkpoint" and 2 * fields["seconds"] > self._grace_s:
            self._grace_s = float("inf")
            log.warning(
                "a checkpoint took %.0f s: give torchrun --shutdown-timeout %.0f, or it may kill ranks while they save",
                *(fields["seconds"], 3 * fields["seconds"]),
            )


def _record_first(monitor: Monitor, step: int) -> None:
    """A run that goes on from a checkpoint has the record of every step up to it."""
    if not monitor.wait_recorded(step, RECORD_WITHIN_S):
        log.warning("the record is behind the checkpoint of step %d: what is between is lost if the run dies now", step)
    monitor.sync_record()


def _set_threads(config: TrainConfig, world: World) -> None:
    cores = len(usable_cores())
    threads = config.threads or max(1, cores // world.local_size)
    if threads * world.local_size > cores:
        log.warning(
            "%d ranks x %d threads share %d cores on node %s: waiting for a core will show as contention",
            world.local_size,
            threads,
            cores,
            world.node,
        )
    torch.set_num_threads(threads)
