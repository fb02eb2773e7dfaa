"""The torchrun commands that work for the cluster that was found (pure)."""

from dataclasses import dataclass

from bireme.doctor.cluster import Cluster
from bireme.doctor.facts import HANDED_OUT_FROM
from bireme.network import Endpoint
from bireme.text import shell

_TRAIN = "-m bireme train --preset toy"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to start one node: with the static rendezvous, and with c10d (None: for one node)."""

    node: str
    command: str
    c10d: str | None


def recipes(cluster: Cluster) -> list[Recipe]:
    """One for each node that answered, by node; empty where node 0, which the others must know, did not."""
    if cluster.alone:
        facts = cluster.facts[cluster.own]
        return [
            Recipe(cluster.label(cluster.own), f"torchrun --standalone --nproc-per-node={facts.ranks} {_TRAIN}", None)
        ]
    first = cluster.first
    if first is None or first.address is None:
        return []
    held = [each for each in first.ports if each.port == first.master_port and not each.free]
    # A port that torchrun picked at random for this run is no port for the next.
    unfit = any(not each.ours or first.master_port >= HANDED_OUT_FROM for each in held)
    port = first.free_port if unfit and first.free_port else first.master_port
    gpus = any(facts.gpus for facts in cluster.facts.values())
    made = []
    for index, facts in sorted(cluster.facts.items()):
        variables = _variables(facts.interface, gpus)
        size = f"--nnodes={cluster.size}"
        ranks = f"--nproc-per-node={facts.ranks}"
        static = (
            f"{variables}torchrun {size} --node-rank={index} {ranks} "
            f"--master-addr={shell(first.address)} --master-port={port} {_TRAIN}"
        )
        endpoint = shell(str(Endpoint(first.address, port)))
        c10d = (
            f"{variables}torchrun {size} {ranks} --rdzv-id=bireme --rdzv-backend=c10d "
            f"--rdzv-endpoint={endpoint} --rdzv-conf=is_host={'true' if index == 0 else 'false'} "
            f"--local-addr={shell(facts.address or '')} {_TRAIN}"
        )
        made.append(Recipe(cluster.label(index), static, c10d if facts.address else None))
    return made


def _variables(interface: str | None, gpus: bool) -> str:
    if interface is None:
        return ""
    nccl = f"NCCL_SOCKET_IFNAME={shell('=' + interface)} " if gpus else ""
    return f"GLOO_SOCKET_IFNAME={shell(interface)} {nccl}"
