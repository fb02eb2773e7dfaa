"""Which rank of how many this process is, from what torchrun, Slurm or a person put into the environment."""

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bireme.errors import UserError

MOST_NODES = 100_000  # more is a mistake in a list of nodes
UNSHAPED = "unshaped"  # what BIREME_LINK says where emulated nodes are plain processes on loopback

# Slurm numbers the steps that are no srun (batch script, interactive shell, extern) from the top of 32 bits down.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# Below the range from which the kernel takes ports for outgoing connections.
_FIRST_SLURM_PORT, _SLURM_PORTS = 20000, 10000


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher's environment says: which rank of how many, and where they meet.

    Which node a rank is really on is learned when the ranks have met (World.nodes); `node_rank` and `num_nodes` are
    the launcher's numbers, where it gives them, and otherwise those of equal nodes.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    master_address: str  # empty: one process, no meeting point
    master_port: int
    agent_store: bool  # torchrun's agent already hosts the store
    launcher: str  # "torchrun", "slurm", "environment" (RANK or NODE_RANK were set by somebody), "none"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "Launch":
        """torchrun's variables (or RANK, or NODE_RANK, set by hand) come before the srun step, and that before one
        process alone. UserError, with both values, for the first contradiction."""
        for problem in _problems(environ):
            raise UserError(problem)
        launcher = _launcher(environ)
        if launcher == "none":
            return cls(0, 1, 0, 1, 0, 1, "", 0, False, "none")
        if launcher == "slurm":
            return _from_step(environ)
        address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        agent_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if launcher == "nodes":
            rank, size = int(environ["NODE_RANK"]), int(environ["NNODES"])
            return cls(rank, size, 0, 1, rank, size, address, port, agent_store, "environment")
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        local_size = int(environ.get("LOCAL_WORLD_SIZE", size))
        return cls(
            rank,
            size,
            int(environ.get("LOCAL_RANK", rank)),
            local_size,
            int(environ.get("GROUP_RANK", rank // local_size)),
            int(environ.get("GROUP_WORLD_SIZE", -(-size // local_size))),
            address,
            port,
            agent_store,
            "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment",
        )


def contradictions(environ: Mapping[str, str]) -> list[str]:
    """Everything that does not fit together, each in one line with both values."""
    return list(_problems(environ))


def run_id(environ: Mapping[str, str]) -> str:
    """What tells this job from another one at the same meeting point; empty when the launcher gives no name."""
    step = _step(environ)
    if "TORCHELASTIC_RUN_ID" in environ:
        return environ["TORCHELASTIC_RUN_ID"]
    return f"{environ.get('SLURM_JOB_ID', '')}.{step}" if step is not None else ""


def forgotten_launcher(environ: Mapping[str, str]) -> str | None:
    """One line for a process that is alone in a Slurm job of several tasks; None when nothing looks forgotten."""
    tasks = _number(environ, "SLURM_NTASKS")
    if _launcher(environ) != "none" or _step(environ) is not None or tasks is None or tasks < 2:
        return None
    return (
        f"this Slurm job has {tasks} tasks (SLURM_NTASKS), but this process was started by neither srun nor torchrun: "
        "it trains alone"
    )


def _launcher(environ: Mapping[str, str]) -> str:
    """Whose variables count: "ranks" (torchrun's names), "nodes", "slurm" or "none"."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return "ranks"
    if "NODE_RANK" in environ and "NNODES" in environ:
        return "nodes"
    return "slurm" if _step(environ) is not None else "none"


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """A variable's whole number; None when it is absent, empty or something else."""
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        return None


# --- Slurm -------------------------------------------------------------------------------------------------------


def _step(environ: Mapping[str, str]) -> int | None:
    """The number of the srun step that started this process.

    In a batch script and in salloc's shell SLURM_PROCID is 0 and SLURM_NTASKS is the job's: there is no step, and
    nobody started the other tasks.
    """
    step = _number(environ, "SLURM_STEP_ID")
    return step if step is not None and 0 <= step < _FIRST_SPECIAL_STEP else None


def _step_tasks(environ: Mapping[str, str]) -> int | None:
    """Tasks of the step, not of the job."""
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    return tasks if tasks is not None else _number(environ, "SLURM_NTASKS")


def _from_step(environ: Mapping[str, str]) -> Launch:
    size, rank = _step_tasks(environ) or 1, _number(environ, "SLURM_PROCID") or 0
    if size == 1:
        return Launch(0, 1, 0, 1, 0, 1, "", 0, False, "slurm")
    nodes = expand_nodelist(environ["SLURM_STEP_NODELIST"])
    node = _number(environ, "SLURM_NODEID") or 0
    per_node = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    job_step = zlib.crc32(run_id(environ).encode())
    return Launch(
        rank,
        size,
        _number(environ, "SLURM_LOCALID") or 0,
        per_node[node] if per_node else -(-size // len(nodes)),
        node,
        len(nodes),
        environ.get("MASTER_ADDR") or nodes[0],
        int(environ.get("MASTER_PORT") or _FIRST_SLURM_PORT + job_step % _SLURM_PORTS),
        False,
        "slurm",
    )


def expand_counts(text: str) -> list[int]:
    """Slurm's ``4(x2),1`` as ``[4, 4, 1]``. UserError for anything else."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise UserError(f"{text!r} is not a list of tasks per node, as in 4(x2),1")
        if len(counts) + int(match[2] or 1) > MOST_NODES:
            raise UserError(f"{text!r} names more than {MOST_NODES} nodes")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_nodelist(text: str) -> list[str]:
    """Slurm's ``node[01-03,07],x2`` as single names, in order. UserError for anything else."""
    names: list[str] = []
    for part in filter(None, re.split(r",(?![^\[]*\])", text.strip())):
        pieces = re.split(r"\[([^\[\]]*)\]", part)  # text, inside of brackets, text, ...
        if any(bracket in piece for piece in pieces for bracket in "[]"):
            raise UserError(f"{text!r} is not a list of nodes, as in node[01-03,07],x2")
        expanded = [""]
        for index, piece in enumerate(pieces):
            choices = _expand_ranges(piece, text) if index % 2 else [piece]
            if len(expanded) * len(choices) > MOST_NODES:
                raise UserError(f"{text!r} names more than {MOST_NODES} nodes")
            expanded = [before + choice for before in expanded for choice in choices]
        names += expanded
    return names


def _expand_ranges(inside: str, text: str) -> list[str]:
    numbers: list[str] = []
    for each in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", each.strip())
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise UserError(f"{text!r} is not a list of nodes: {each!r} is not a number or a range, as in [01-03,07]")
        first, last = match[1], match[2] or match[1]
        if len(numbers) + int(last) - int(first) >= MOST_NODES:
            raise UserError(f"{text!r} names more than {MOST_NODES} nodes")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


# --- contradictions ----------------------------------------------------------------------------------------------


def _problems(environ: Mapping[str, str]) -> Iterator[str]:
    launcher = _launcher(environ)
    if launcher == "ranks":
        yield from _problems_of_ranks(environ)
    elif launcher == "nodes":
        yield from _problems_of_numbers(environ, "NODE_RANK", "NNODES")
        yield from _problems_of_meeting(environ, "NODE_RANK")
    if _step(environ) is None:
        return
    yield from _problems_of_step(environ, alone=launcher == "slurm")
    if launcher == "ranks" and "TORCHELASTIC_RUN_ID" in environ:
        yield from _torchrun_against_step(environ)
    elif launcher != "slurm":
        yield from _numbers_against_step(environ, *(("RANK", "WORLD_SIZE") if launcher == "ranks" else _NODES))


_NODES = ("NODE_RANK", "NNODES")


def _problems_of_ranks(environ: Mapping[str, str]) -> Iterator[str]:
    for present, absent in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if absent not in environ:
            yield (f"{present}={environ[present]} is set but {absent} is not: start with torchrun, or unset {present}")
            return
    yield from _problems_of_numbers(environ, "RANK", "WORLD_SIZE")
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        if name in environ and _number(environ, name) is None:
            yield f"{name}={environ[name]!r} is not a whole number"
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if rank is not None and size is not None and 0 <= rank < size:
        local_rank = _number({"LOCAL_RANK": str(rank), **environ}, "LOCAL_RANK")
        local_size = _number({"LOCAL_WORLD_SIZE": str(size), **environ}, "LOCAL_WORLD_SIZE")
        if local_rank is not None and local_size is not None and not 0 <= local_rank < local_size <= size:
            yield (
                f"LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_size} and WORLD_SIZE={size} contradict each other"
            )
        agent, agents = _number(environ, "GROUP_RANK"), _number(environ, "GROUP_WORLD_SIZE")
        if agent is not None and agents is not None and not 0 <= agent < agents <= size:
            yield f"GROUP_RANK={agent}, GROUP_WORLD_SIZE={agents} and WORLD_SIZE={size} contradict each other"
        elif agents == 1 and local_size is not None and "LOCAL_WORLD_SIZE" in environ and local_size != size:
            yield (
                f"GROUP_WORLD_SIZE=1 says that all ranks are on one node, but LOCAL_WORLD_SIZE={local_size} "
                f"and WORLD_SIZE={size}"
            )
    yield from _problems_of_meeting(environ, "RANK")


def _problems_of_numbers(environ: Mapping[str, str], rank_name: str, size_name: str) -> Iterator[str]:
    rank, size = _number(environ, rank_name), _number(environ, size_name)
    for name, value in ((rank_name, rank), (size_name, size)):
        if value is None:
            yield f"{name}={environ[name]!r} is not a whole number"
    if rank is not None and size is not None and not 0 <= rank < size:
        yield f"{rank_name}={rank} does not fit {size_name}={size}: ranks count from 0 to {size - 1}"


def _problems_of_meeting(environ: Mapping[str, str], rank_name: str) -> Iterator[str]:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            yield f"{rank_name}={environ[rank_name]} is set but {name} is not: start with torchrun, or set {name}"
    yield from _problems_of_port(environ)


def _problems_of_port(environ: Mapping[str, str]) -> Iterator[str]:
    if environ.get("MASTER_PORT"):
        port = _number(environ, "MASTER_PORT")
        if port is None:
            yield f"MASTER_PORT={environ['MASTER_PORT']!r} is not a whole number"
        elif not 0 < port < 65536:
            yield f"MASTER_PORT={port} is not a port: choose one from 1024 to 65535"


def _problems_of_step(environ: Mapping[str, str], alone: bool) -> Iterator[str]:
    """`alone`: nothing but the step says which rank this is."""
    tasks, task = _step_tasks(environ), _number(environ, "SLURM_PROCID")
    if tasks is None or task is None:
        if alone:
            for name, value in (("SLURM_STEP_NUM_TASKS", tasks), ("SLURM_PROCID", task)):
                if value is None:
                    yield f"SLURM_STEP_ID={_step(environ)} is set but {name} is not a whole number: start with srun"
        return
    if not 0 <= task < tasks:
        yield f"SLURM_PROCID={task} does not fit SLURM_STEP_NUM_TASKS={tasks}: ranks count from 0 to {tasks - 1}"
    components = _number(environ, "SLURM_HET_SIZE")
    if components is not None and components > 1:
        if alone:
            yield (
                f"SLURM_HET_SIZE={components}: the parts of a heterogeneous job count their ranks apart "
                f"(SLURM_STEP_NUM_TASKS={tasks} is this part's): start torchrun in every part instead"
            )
        return
    if tasks == 1:
        return
    try:
        nodes = expand_nodelist(environ.get("SLURM_STEP_NODELIST", ""))
        per_node = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    except UserError as error:
        yield f"Slurm: {error}"
        return
    node, local = _number(environ, "SLURM_NODEID") or 0, _number(environ, "SLURM_LOCALID") or 0
    if per_node and sum(per_node) != tasks:
        yield (
            f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']} adds up to {sum(per_node)} tasks, "
            f"but SLURM_STEP_NUM_TASKS={tasks}"
        )
    if nodes and per_node and len(nodes) != len(per_node):
        yield (
            f"SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']} has {len(nodes)} nodes, but "
            f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']} has {len(per_node)}"
        )
    elif per_node and node >= len(per_node):
        yield f"SLURM_NODEID={node} does not fit the {len(per_node)} nodes of SLURM_STEP_TASKS_PER_NODE"
    elif per_node and local >= per_node[node]:
        yield f"SLURM_LOCALID={local} does not fit the {per_node[node]} tasks of node {node}"
    if alone:
        if not nodes:
            yield f"SLURM_STEP_NUM_TASKS={tasks} but SLURM_STEP_NODELIST is not set: start with srun"
        yield from _problems_of_port(environ)


def _torchrun_against_step(environ: Mapping[str, str]) -> Iterator[str]:
    """One torchrun in every task is normal nesting, and torchrun numbers its nodes as it likes (GROUP_RANK need not
    be SLURM_PROCID). Another number of agents than of tasks means worlds too small, or ranks that never come."""
    tasks, agents = _step_tasks(environ), _number(environ, "GROUP_WORLD_SIZE")
    several_parts = (_number(environ, "SLURM_HET_SIZE") or 1) > 1
    # A task of its own step for each node is normal too.
    if tasks is None or agents is None or tasks == 1 or tasks == agents or several_parts:
        return
    elastic = _number(environ, "TORCHELASTIC_MAX_RESTARTS") or 0
    if 1 < agents < tasks and elastic:
        return  # it lost a node, or one has yet to come
    yield (
        f"torchrun has {agents} node{'s' if agents > 1 else ''} (GROUP_WORLD_SIZE) but the srun step has {tasks} "
        f"tasks (SLURM_STEP_NUM_TASKS), each of which starts torchrun: use torchrun --nnodes {tasks}, or "
        f"srun --ntasks {agents}"
    )


def _numbers_against_step(environ: Mapping[str, str], rank_name: str, size_name: str) -> Iterator[str]:
    """RANK and the like, set by hand in a step: from outside of srun every task gets the same."""
    rank, size = _number(environ, rank_name), _number(environ, size_name)
    task, tasks = _number(environ, "SLURM_PROCID"), _step_tasks(environ)
    if rank is None or size is None or task is None or tasks is None or tasks == 1:
        return
    forks = size > tasks and (_number(environ, "LOCAL_WORLD_SIZE") or 1) > 1
    if size != tasks and not forks:
        yield (
            f"{size_name}={size} but the srun step has {tasks} tasks (SLURM_STEP_NUM_TASKS): set {size_name} to "
            f"{tasks}, or unset {rank_name} and {size_name}"
        )
    elif size == tasks and rank != task:
        yield (
            f"{rank_name}={rank} but this is task {task} of the srun step (SLURM_PROCID): set {rank_name} inside of "
            f"srun, or unset {rank_name} and {size_name}"
        )
