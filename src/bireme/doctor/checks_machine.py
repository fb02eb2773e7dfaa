"""Are the machines alike, and will they be fast? Pure: from the facts of all nodes to checks."""

import re
from collections.abc import Iterator

from bireme.doctor.cluster import Check, Cluster, Status
from bireme.doctor.facts import Facts
from bireme.environment import UNSHAPED
from bireme.text import count, listed, shell

CLOCK_LIMIT_S = 1.0
CROWDED, HOPELESS = 1.0, 4.0  # threads per core: above the first they wait for each other, from the second on always
BATCH_BYTES = 8 << 20
PREFETCH = 2  # batches that each worker of a PyTorch loader keeps ready
DOCKER_SHM_BYTES = 64 << 20
HOOKS_SINCE = (2, 14)


def versions(cluster: Cluster) -> Iterator[Check]:
    """Python, torch and bireme: other than node 0's."""
    reference_index = 0 if 0 in cluster.facts else cluster.own
    reference, reference_label = cluster.facts[reference_index], cluster.label(reference_index)
    good = True
    for label, facts in cluster.each():
        for package, expected in reference.versions.items():
            found = facts.versions.get(package, "none")
            if found == expected:
                continue
            good = False
            severity: Status = "warn" if _compatible(package, found, expected) else "fail"
            text = f"{label} has {package} {found}, {reference_label} has {expected}"
            yield Check("versions", severity, text, (label,), f"on {label}: {_install(package, expected)}")
        if facts.versions.get("torch") == "none":
            good = False
            yield Check("versions", "fail", f"{label} has no torch", (label,), f"on {label}: pip install torch")
    if good:
        what = ", ".join(f"{package} {version}" for package, version in reference.versions.items())
        yield Check("versions", "pass", what + ("" if cluster.alone else f" on {count(len(cluster.facts), 'node')}"))


def _compatible(package: str, one: str, other: str) -> bool:
    """Differences that do not matter to what ranks say to each other: Python's patch level, torch's build for a GPU."""
    if package == "python":
        return one.split(".")[:2] == other.split(".")[:2]
    return package == "torch" and one.partition("+")[0] == other.partition("+")[0]


def _install(package: str, version: str) -> str:
    if package == "python":
        return f"make the environment anew with python{'.'.join(version.split('.')[:2])}"
    return f"python -m pip install {shell(f'{package}=={version}')}"


def clock(cluster: Cluster) -> Iterator[Check]:
    """Each clock against node 0's. Logs and traces are compared by them; the ledger never is."""
    if cluster.alone or 0 not in cluster.facts:
        return
    shown, good = [], True
    for index, facts in sorted(cluster.facts.items()):
        if index == 0:
            continue
        label = cluster.label(index)
        if facts.clock is None:
            good = False
            yield Check("clock", "warn", f"{label}: its clock could not be compared", (label,))
            continue
        offset_s, bound_s = facts.clock.offset_s, facts.clock.bound_s
        text = f"{label} {offset_s * 1e3:+.2f} ms ± {bound_s * 1e3:.2f} ms"
        if abs(offset_s) - bound_s > CLOCK_LIMIT_S:
            good = False
            way = "ahead of" if offset_s > 0 else "behind"
            text = (
                f"{label}'s clock is {abs(offset_s):.3f} s {way} {cluster.label(0)}'s (± {bound_s * 1e3:.2f} ms): "
                "logs and traces of the nodes cannot be compared by their times (the ledger does not need it)"
            )
            yield Check("clock", "warn", text, (label,), f"on {label}: sudo chronyc makestep")
        else:
            shown.append(text)
    if good and shown:
        yield Check("clock", "pass", f"against {cluster.label(0)}: {listed(shown)}")


def cores(cluster: Cluster) -> Iterator[Check]:
    """Ranks times threads against what affinity and the CPU quota allow."""
    good = []
    for label, facts in cluster.each():
        wanted = facts.ranks * facts.threads
        has = f"{facts.cores:g} usable {'core' if facts.cores == 1 else 'cores'}"
        if facts.quota_cores is not None and facts.quota_cores < facts.affinity_cores:
            has += f" (a CPU quota; {count(facts.affinity_cores, 'core')} visible)"
        what = f"{count(facts.ranks, 'rank')} x {count(facts.threads, 'thread')}"
        if wanted <= facts.cores * CROWDED:
            good.append(f"{label} {what} on {has}")
            continue
        severity: Status = "fail" if wanted >= facts.cores * HOPELESS else "warn"
        text = f"{label}: {what} ({facts.threads_from}) share {has}: they will wait for a core, shown as contention"
        yield Check("cores", severity, text, (label,), f"on {label}: {_fewer(facts)}")
    if len(good) == len(cluster.facts):
        yield Check("cores", "pass", listed(good))


def _fewer(facts: Facts) -> str:
    threads = int(facts.cores // facts.ranks)
    if threads >= 1:
        return f"export OMP_NUM_THREADS={threads}"
    return f"torchrun --nproc-per-node={max(1, int(facts.cores))} ..., with export OMP_NUM_THREADS=1"


def shared_memory(cluster: Cluster) -> Iterator[Check]:
    """Loader workers hand over their batches through /dev/shm; a container often has 64 MiB of it."""
    good = []
    for label, facts in cluster.each():
        total, free = facts.shm_bytes, facts.shm_free_bytes
        if total is None or free is None:
            good.append(f"{label} has no /dev/shm" + ("" if facts.workers else ", not needed without loader workers"))
            continue
        needed = PREFETCH * facts.workers * facts.ranks * BATCH_BYTES
        assumed = (
            f"{facts.ranks} x {count(facts.workers, 'loader worker')} keep {PREFETCH} batches each, "
            f"{_mib(needed)} if a batch is {_mib(BATCH_BYTES)}"
        )
        fix = f"docker run --shm-size={max(1, -(-2 * needed // (1 << 30)))}g ..., or --ipc=host"
        if facts.workers and free < needed:
            text = f"{label}: /dev/shm has {_mib(free)} free of {_mib(total)}, but {assumed}"
            yield Check("shared memory", "fail", text, (label,), f"on {label}: {fix}")
        elif facts.workers and total <= DOCKER_SHM_BYTES:
            text = f"{label}: /dev/shm has {_mib(total)}, Docker's default: larger batches will not fit ({assumed})"
            yield Check("shared memory", "warn", text, (label,), f"on {label}: {fix}")
        else:
            good.append(f"{label} {_mib(free)} free" + (f" ({assumed})" if facts.workers else ""))
    if len(good) == len(cluster.facts):
        without = not any(facts.workers for facts in cluster.facts.values())
        yield Check("shared memory", "pass", listed(good) + ("; no loader workers (--workers)" if without else ""))


def _mib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"


def observation(cluster: Cluster) -> Iterator[Check]:
    """What Bireme can measure here, and whether nodes can be emulated."""
    without_hooks, without_schedstat, without_namespaces = [], [], {}
    for label, facts in cluster.each():
        if _release(facts.versions.get("torch", "")) < HOOKS_SINCE:
            without_hooks.append(label)
        if not facts.schedstat:
            without_schedstat.append(label)
        if facts.namespaces_error:
            without_namespaces[label] = facts.namespaces_error
    if without_hooks:
        text = f"{listed(without_hooks)}: torch before 2.14 has no process-group hooks: transfer and wait will be n/a"
        yield Check("hooks", "warn", text, tuple(without_hooks), "python -m pip install 'torch>=2.14'")
    else:
        yield Check("hooks", "pass", "torch tells of every collective (process-group hooks)")
    if without_schedstat:
        text = f"{listed(without_schedstat)}: no /proc/self/schedstat: contention will be n/a, counted as blocked"
        yield Check("schedstat", "warn", text, tuple(without_schedstat), "a kernel with CONFIG_SCHED_INFO")
    else:
        yield Check("schedstat", "pass", "the kernel tells running from runnable (schedstat)")
    for why in dict.fromkeys(without_namespaces.values()):
        labels = [label for label, each in without_namespaces.items() if each == why]
        text = f"{listed(labels)}: no network namespaces ({why}): `bireme nodes` will use plain processes, unshaped"
        limited = "max_net_namespaces" in why
        fix = (
            "sudo sysctl user.max_net_namespaces=1000"
            if limited
            else "run it as root, or: sudo sysctl "
            + " ".join(
                f"kernel.{name}" for name in ("unprivileged_userns_clone=1", "apparmor_restrict_unprivileged_userns=0")
            )
        )
        yield Check("namespaces", "warn", text, tuple(labels), fix)
    if not without_namespaces:
        yield Check("namespaces", "pass", "`bireme nodes` can make real nodes (network namespaces)")


def _release(version: str) -> tuple[int, int]:
    match = re.match(r"(\d{1,6})\.(\d{1,6})", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def launcher(cluster: Cluster) -> Iterator[Check]:
    """Variables that contradict each other; and nodes of which each thinks of another world."""
    good = True
    for label, facts in cluster.each():
        for text in facts.contradictions:
            good = False
            fix = f"on {label}: env | grep -E '^(RANK|WORLD_SIZE|LOCAL_|GROUP_|NODE_RANK|NNODES|MASTER_|SLURM_)'"
            yield Check("launcher", "fail", f"{label}: {text}", (label,), fix)
        for text in facts.hints:
            good = False
            yield Check("launcher", "warn", f"{label}: {text}", (label,), "srun bireme doctor")
    for what, values in (
        ("nodes", {label: facts.nodes for label, facts in cluster.each()}),
        ("ranks", {label: facts.world_size for label, facts in cluster.each()}),
    ):
        if len(set(values.values())) > 1:
            good = False
            counts = [f"{label} {each} {what}" for label, each in values.items()]
            text = f"the nodes count different worlds: {listed(counts)}"
            fix = "start every node with the same --nnodes (NNODES) and WORLD_SIZE"
            yield Check("launcher", "fail", text, tuple(values), fix)
    if good:
        kinds = {facts.launcher for facts in cluster.facts.values()}
        names = {"none": "no launcher", "environment": "the environment says who is who"}
        yield Check(
            "launcher", "pass", f"{listed([names.get(each, each) for each in sorted(kinds)])}, no contradiction"
        )


def open_files(cluster: Cluster) -> Iterator[Check]:
    """Every rank keeps connections to all others, in every group."""
    good = []
    for label, facts in cluster.each():
        world_size = facts.world_size or facts.ranks * cluster.size
        needed = 256 + 8 * world_size
        if facts.open_files is not None and facts.open_files < needed:
            text = f"{label}: a process may open {facts.open_files} files, {world_size} ranks may need {needed}"
            yield Check("open files", "warn", text, (label,), f"on {label}: ulimit -n {max(65536, needed)}")
        else:
            good.append(f"{label} {facts.open_files or 'no limit'}")
    if len(good) == len(cluster.facts):
        yield Check("open files", "pass", listed(good))


def emulation(cluster: Cluster) -> Iterator[Check]:
    """What of this cluster is emulated or pretended."""
    links = {label: facts.link for label, facts in cluster.each() if facts.link}
    if links:
        unshaped = [label for label, link in links.items() if link == UNSHAPED]
        if unshaped:
            text = f"{listed(unshaped)}: emulated nodes are plain processes on loopback: no real link (unshaped)"
            yield Check("link", "warn", text, tuple(unshaped))
        else:
            text = (
                f"emulated nodes of this machine, links {listed(list(dict.fromkeys(str(e) for e in links.values())))}"
            )
            yield Check("link", "pass", text, tuple(links))
    pretended = {label: ",".join(facts.pretended) for label, facts in cluster.each() if facts.pretended}
    if pretended:
        text = "pretended, not found: " + listed([f"{words} on {label}" for label, words in pretended.items()])
        yield Check("pretended", "warn", text, tuple(pretended), "unset BIREME_DOCTOR_PRETEND")


MACHINE_CHECKS = (versions, clock, cores, shared_memory, observation, launcher, open_files, emulation)
