"""Preparing text: throughput against a bare loop over the same tokenizer, peak memory, and a kill with a restart.

    python benchmarks/prepare.py --megabytes 1000

The text is Python's standard library, shuffled and repeated, as one file and as JSON lines; the byte-pair tokenizer is
trained on it first. Everything happens in a temporary folder; needs bireme[tokenizers].
"""

import argparse
import filecmp
import os
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil
from rich.console import Console
from rich.table import Table

import bireme
from bireme.data import open_tokens
from bireme.data.tokenizers import load_tokenizer
from bireme.record import utc_now, write_json_atomic

RESULTS = Path(__file__).resolve().parent.parent / "runs" / "benchmarks"
VOCABULARY = 8192
TRAINED_ON_BYTES = 8_000_000
SAMPLE_EVERY_S = 0.05
BATCH_CHARACTERS = 1 << 20


# --- the text ----------------------------------------------------------------------------------------------------


def documents() -> list[str]:
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in path.parts:
            try:
                found.append(path.read_text())
            except (OSError, UnicodeDecodeError):
                continue
    return [each for each in found if each]


def write_text(folder: Path, name: str, size_bytes: int, seed: int) -> None:
    """NAME.txt and NAME.jsonl, each of about so many bytes."""
    draw = random.Random(seed)
    texts = documents()
    written = 0
    with (folder / f"{name}.txt").open("w") as plain, (folder / f"{name}.jsonl").open("wb") as lines:
        while written < size_bytes:
            draw.shuffle(texts)
            for text in texts:
                plain.write(text)
                written += lines.write(orjson.dumps({"text": text}) + b"\n")
                if written >= size_bytes:
                    break


def train_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = documents()
    random.Random(0).shuffle(texts)
    sample: list[str] = []
    while texts and sum(map(len, sample)) < TRAINED_ON_BYTES:
        sample.append(texts.pop())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.save(str(path))


# --- what is compared --------------------------------------------------------------------------------------------


def bare_loop(source: Path, tokenizer_path: str, target: Path) -> None:
    """One process, one tokenizer, JSON lines to an array on disk, and nothing else. Run as a process of its own."""
    tokenizer = load_tokenizer(tokenizer_path)
    separator = np.array([tokenizer.separator], np.uint16)
    with source.open("rb") as lines, target.open("wb") as file:
        texts: list[str] = []
        characters = 0

        def flush() -> None:
            for tokens in tokenizer.encode_batch(texts):
                file.write(tokens.astype(np.uint16).data)
                file.write(separator.data)
            texts.clear()

        for line in lines:
            texts.append(orjson.loads(line)["text"])
            characters += len(texts[-1])
            if characters >= BATCH_CHARACTERS:
                flush()
                characters = 0
        flush()


@dataclass
class Measured:
    seconds: float
    peak_bytes: int  # resident, of all processes together; what they share is counted in each


def measure(command: list[str], kill_at_shards: tuple[Path, int] | None = None) -> Measured:
    """Runs a command to its end, or kills it when a folder holds so many shards."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    began = time.monotonic()
    peak = 0
    process = psutil.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    children: list[psutil.Process] = []
    while process.poll() is None:
        try:
            children = process.children(recursive=True)
            peak = max(peak, sum(each.memory_info().rss for each in [process, *children]))
        except psutil.Error:  # one ended in between
            pass
        if kill_at_shards is not None:
            folder, most = kill_at_shards
            if len(list(folder.glob("shard-*.tokens"))) >= most:
                process.kill()
        time.sleep(SAMPLE_EVERY_S)
    seconds = time.monotonic() - began
    _, left = psutil.wait_procs(children, timeout=10)
    if left:
        raise RuntimeError(f"{len(left)} worker processes outlived the command")
    if process.returncode != 0 and kill_at_shards is None:
        raise RuntimeError(f"exit code {process.returncode}: {' '.join(command)}")
    return Measured(seconds, peak)


def prepare(source: Path, out: Path, tokenizer: str, workers: int) -> list[str]:
    command = [sys.executable, "-m", "bireme", "data", "prepare", str(source), "--out", str(out)]
    return [*command, "--tokenizer", tokenizer, "--workers", str(workers)]


def same_folders(one: Path, other: Path) -> bool:
    names = sorted(each.name for each in one.iterdir())
    if names != sorted(each.name for each in other.iterdir()):
        return False
    return filecmp.cmpfiles(one, other, names, shallow=False) == (names, [], [])


def pairs(folder: Path, kind: str, tokenizer: str, workers: int, count: int) -> dict[str, Any]:
    """The bare loop and the preparation take turns on the same text: MB/s of each."""
    source, bare_tokens = folder / "slice.jsonl", folder / "bare.bin"
    size_mb = source.stat().st_size / 1e6
    rates: dict[str, list[float]] = {"bare loop, one process": [], f"prepare, {workers} workers": []}
    bare, ours = rates.values()
    for turn in range(count):
        out = folder / f"{kind} {turn}"
        command = [sys.executable, __file__, "--bare", str(source), tokenizer, str(bare_tokens)]
        bare.append(size_mb / measure(command).seconds)
        ours.append(size_mb / measure(prepare(source, out, tokenizer, workers)).seconds)
        if open_tokens(out).count * 2 != bare_tokens.stat().st_size:
            raise RuntimeError("the preparation and the bare loop give different tokens")
    ratio = statistics.median(b / a for a, b in zip(bare, ours, strict=True))
    return {"megabytes": size_mb, "mb_per_s": rates, "ratio": ratio}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=1000.0, help="of text (default 1000)")
    parser.add_argument("--pair-megabytes", type=float, default=50.0, help="that the pairs compare (default 50)")
    parser.add_argument("--pairs", type=int, default=3, help="of bare loop and preparation (default 3)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "prepare.json", help="where the numbers go")
    parser.add_argument("--bare", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        bare_loop(Path(options.bare[0]), options.bare[1], Path(options.bare[2]))
        return 0
    console = Console(soft_wrap=True)
    results: dict[str, Any] = {"benchmark": "prepare", "time_utc": utc_now(), "bireme": bireme.__version__}
    with tempfile.TemporaryDirectory(prefix="bireme-prepare-") as name:
        folder = Path(name)
        byte_pairs = str(folder / "tokenizer.json")
        train_tokenizer(Path(byte_pairs))
        write_text(folder, "whole", int(options.megabytes * 1e6), seed=1)
        write_text(folder, "slice", int(min(options.megabytes, options.pair_megabytes) * 1e6), seed=2)
        slice_bytes = (folder / "slice.jsonl").stat().st_size
        results["pairs"] = {
            kind: pairs(folder, kind, tokenizer, options.workers, options.pairs)
            for kind, tokenizer in (("byte pairs", byte_pairs), ("bytes", "bytes"))
        }
        table = Table(title=f"{slice_bytes / 1e6:.0f} MB of JSON lines, medians of {options.pairs} pairs")
        for heading in ("tokenizer", "bare loop, MB/s", f"prepare with {options.workers} workers, MB/s", "ratio"):
            table.add_column(heading)
        for kind, result in results["pairs"].items():
            rates = [f"{statistics.median(each):.2f}" for each in result["mb_per_s"].values()]
            table.add_row(kind, *rates, f"{result['ratio']:.2f}")
        console.print(table)

        runs = {}
        for kind, source, tokenizer in (
            ("one file, byte pairs", "whole.txt", byte_pairs),
            ("JSON lines, byte pairs", "whole.jsonl", byte_pairs),
            ("one file, bytes", "whole.txt", "bytes"),
            ("JSON lines, bytes", "whole.jsonl", "bytes"),
        ):
            size_bytes = (folder / source).stat().st_size
            measured = measure(prepare(folder / source, folder / kind, tokenizer, options.workers))
            runs[kind] = {
                "megabytes": size_bytes / 1e6,
                "mb_per_s": size_bytes / 1e6 / measured.seconds,
                "peak_mb": measured.peak_bytes / 1e6,
            }
        results["runs"] = runs
        table = Table(title=f"{options.megabytes:.0f} MB with {options.workers} workers")
        for heading in ("", "MB/s", "peak memory of all processes, MB"):
            table.add_column(heading)
        for kind, run in runs.items():
            table.add_row(kind, f"{run['mb_per_s']:.2f}", f"{run['peak_mb']:.0f}")
        console.print(table)

        whole = folder / "one file, byte pairs"
        again = folder / "again"
        shards = len(list(whole.glob("shard-*.tokens")))
        command = prepare(folder / "whole.txt", again, byte_pairs, options.workers)
        measure(command, kill_at_shards=(again, max(1, shards // 3)))
        kept = {each.name: each.stat().st_ino for each in again.glob("shard-*.tokens")}
        restarted = measure(command)
        untouched = all((again / name).stat().st_ino == inode for name, inode in kept.items())
        results["restart"] = {
            "shards": shards,
            "kept": len(kept),
            "untouched": untouched,
            "identical": same_folders(whole, again),
            "seconds": restarted.seconds,
        }
        console.print(
            f"killed with {len(kept)} of {shards} shards finished, started again: {restarted.seconds:.1f} s, "
            f"{'identical' if results['restart']['identical'] else 'DIFFERENT'}, finished shards "
            f"{'untouched' if untouched else 'MADE AGAIN'}"
        )
    results["cores"] = os.cpu_count()
    results["load_average"] = os.getloadavg()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(options.out, results)
    console.print(f"{options.out}  load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    good = results["restart"]["identical"] and untouched and all(run["peak_mb"] < 1000 for run in runs.values())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
