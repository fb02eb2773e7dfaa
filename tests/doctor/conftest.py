"""Healthy clusters of facts, for tests to break."""

from collections.abc import Callable
from typing import Any

import pytest

from bireme.doctor.cluster import Cluster
from bireme.doctor.facts import Card, Clock, Facts, Name, Port, Reach


def healthy(index: int, size: int) -> Facts:
    """Node `index` of a cluster in which nothing is wrong."""
    name, address = f"node{index}", f"10.0.0.{index + 1}"
    return Facts(
        index=index,
        name=name,
        machine=f"machine {index}",
        launcher="none",
        nodes=size,
        world_size=None,
        host=Name(name, [address]),
        full_name=Name(f"{name}.cluster", [address]),
        master=Name("node0", ["10.0.0.1"]) if size > 1 else None,
        master_port=29500,
        address=address,
        interface="eth0",
        interface_error=None,
        interface_warnings=[],
        cards=[
            Card("lo", ["127.0.0.1/8", "::1/128"], True, 65536),
            Card("eth0", [f"{address}/24"], True, 1500),
            Card("eth1", [f"192.168.7.{index + 1}/24"], True, 1500),
            Card("eth2", ["172.16.0.9/24"], False, 1500),
        ],
        variables={},
        contradictions=[],
        hints=[],
        ports=[Port(29500, True, None, False), Port(29400, True, None, False)],
        free_port=29500,
        versions={"python": "3.11.7", "torch": "2.14.1", "bireme": "0.1.0"},
        cores=4.0,
        affinity_cores=4,
        quota_cores=None,
        ranks=2,
        ranks_from="--ranks-per-node",
        threads=2,
        threads_from="OMP_NUM_THREADS",
        workers=0,
        shm_bytes=8 << 30,
        shm_free_bytes=8 << 30,
        schedstat=True,
        namespaces_error=None,
        open_files=65536,
        gpus=0,
        link=None,
        listens={address: 40000},
        clock=None if index == 0 else Clock(0.002, 0.0001),
        reaches=[Reach(each, f"10.0.0.{each + 1}", address) for each in range(size) if each != index],
        peer_names=[] if index == 0 else [Name("node0.cluster", ["10.0.0.1"]), Name("node0", ["10.0.0.1"])],
    )


@pytest.fixture
def make_cluster() -> Callable[..., Cluster]:
    """make_cluster(size, n1_threads=8, ...): a healthy cluster, with fields of single nodes changed; the other names
    are fields of the cluster."""

    def make(size: int = 2, **changes: Any) -> Cluster:
        cluster = Cluster(size=size, own=0, facts={index: healthy(index, size) for index in range(size)})
        for name, value in changes.items():
            node, _, field = name.partition("_")
            if node.startswith("n") and node[1:].isdigit():
                assert hasattr(cluster.facts[int(node[1:])], field), field
                setattr(cluster.facts[int(node[1:])], field, value)
            else:
                assert hasattr(cluster, name), name
                setattr(cluster, name, value)
        return cluster

    return make
