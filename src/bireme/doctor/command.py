"""`bireme doctor`: gather what this machine says, meet the others, examine all together, show."""

import os
import sys
import time

from rich.console import Console

from bireme.doctor.attend import attend
from bireme.doctor.checks import examine, passed
from bireme.doctor.cluster import Cluster
from bireme.doctor.machine import gather
from bireme.doctor.meeting import make_plan, process_age_s
from bireme.doctor.pretend import VARIABLE, Pretence
from bireme.doctor.recipe import recipes
from bireme.doctor.show import as_json, show_brief, show_report, verdict
from bireme.errors import UserError

WAIT_S = 6.0
LEAST_WAIT_S = 4.0
# Under torchrun torch must be loaded to find the others, which takes seconds on a busy core.
WAIT_FOR_AGENT_S = 9.0


def doctor_command(
    peers: str | None,
    port: int | None,
    ranks_per_node: int | None,
    workers: int,
    json: bool,
    brief: bool = False,
    wait: float | None = None,
) -> int:
    """1 when a check fails. Ends within about 15 s even where a peer is silent, unless `wait` says otherwise."""
    started_s = time.monotonic() - process_age_s()
    if ranks_per_node is not None and not 1 <= ranks_per_node <= 1024:
        raise UserError(f"--ranks-per-node {ranks_per_node} is not a number of ranks: choose 1 to 1024")
    if not 0 <= workers <= 1024:
        raise UserError(f"--workers {workers} is not a number of loader workers: choose 0 to 1024")
    if wait is not None and not 0 < wait <= 3600:
        raise UserError(f"--wait {wait:g} is not a time to wait in seconds: choose 1 to 3600")
    pretence = Pretence.parse(os.environ.get(VARIABLE, ""))
    plan = make_plan(os.environ, peers, port)
    pretence = pretence.on(plan.meeting.index)
    if not plan.speaks:
        return 0
    facts = gather(
        os.environ,
        index=plan.meeting.index,
        nodes=plan.meeting.size,
        launcher=plan.launcher,
        world_size=plan.world_size,
        master=plan.master,
        master_port=plan.master_port,
        store_held=plan.how == "agent",
        contradictions=plan.contradictions,
        hints=plan.hints,
        ranks_per_node=ranks_per_node,
        workers=workers,
    )
    pretence.apply(facts)
    wait_s = wait if wait is not None else WAIT_FOR_AGENT_S if plan.how == "agent" else WAIT_S
    # What starting took counts, but there is always time to meet: on a busy machine everybody starts slowly.
    now_s = time.monotonic()
    deadline_s = max(started_s + wait_s, now_s + LEAST_WAIT_S) if wait is None else now_s + wait_s
    attendance = attend(plan, facts, lambda: time.time_ns() + pretence.clock_ns, deadline_s)
    cluster = Cluster(
        size=plan.meeting.size,
        own=plan.meeting.index,
        facts=attendance.facts,
        silent=attendance.silent,
        trouble=attendance.trouble,
        labels={index: plan.label(index) for index in range(plan.meeting.size)},
        by_agent=plan.how == "agent",
    )
    checks = examine(cluster)
    told_by_node_0 = plan.meeting.index != 0 and 0 in cluster.facts and cluster.trouble is None and plan.how != "peers"
    if not told_by_node_0:
        made = recipes(cluster)
        if json:
            print(as_json(cluster, checks, made))
        elif brief:
            show_brief(cluster, checks, Console())
        else:
            show_report(cluster, checks, made, Console())
    elif not (json or brief):
        print(f"{verdict(checks)} (the report is {cluster.label(0)}'s)")
    sys.stdout.flush()
    return 0 if passed(checks) else 1
