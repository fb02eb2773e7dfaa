import shlex
from collections.abc import Callable

from bireme.doctor.cluster import Cluster
from bireme.doctor.facts import Port
from bireme.doctor.recipe import recipes

Make = Callable[..., Cluster]


def test_one_machine(make_cluster: Make) -> None:
    (recipe,) = recipes(make_cluster(1))
    assert recipe.command == "torchrun --standalone --nproc-per-node=2 -m bireme train --preset toy"
    assert recipe.c10d is None


def test_each_node_gets_its_own(make_cluster: Make) -> None:
    first, second = recipes(make_cluster(2, n1_interface="bond0", n1_ranks=3))
    assert first.command == (
        "GLOO_SOCKET_IFNAME=eth0 torchrun --nnodes=2 --node-rank=0 --nproc-per-node=2 --master-addr=10.0.0.1 "
        "--master-port=29500 -m bireme train --preset toy"
    )
    assert "GLOO_SOCKET_IFNAME=bond0 " in second.command and "--node-rank=1 --nproc-per-node=3" in second.command
    assert second.c10d is not None
    for word in ("--rdzv-endpoint=10.0.0.1:29500", "--rdzv-conf=is_host=false", "--local-addr=10.0.0.2"):
        assert word in second.c10d.split()
    assert first.c10d is not None and "is_host=true" in first.c10d


def test_ports_that_cannot_be_used(make_cluster: Make) -> None:
    held = [Port(29500, False, "somebody", False)]
    assert "--master-port=29501 " in recipes(make_cluster(2, n0_ports=held, n0_free_port=29501))[1].command
    ours = [Port(29500, False, "torchrun", True)]
    assert "--master-port=29500 " in recipes(make_cluster(2, n0_ports=ours, n0_free_port=29501))[1].command
    random = make_cluster(2, n0_master_port=41234, n0_ports=[Port(41234, False, None, True)], n0_free_port=29500)
    assert "--master-port=29500 " in recipes(random)[0].command


def test_gpus_and_ipv6(make_cluster: Make) -> None:
    first, second = recipes(make_cluster(2, n0_gpus=8, n0_address="fd00::1", n1_address="fd00::2"))
    words = shlex.split(first.command)
    assert words[:2] == ["GLOO_SOCKET_IFNAME=eth0", "NCCL_SOCKET_IFNAME==eth0"]
    assert "--master-addr=fd00::1" in words
    assert "--rdzv-endpoint=[fd00::1]:29500" in shlex.split(second.c10d or "")


def test_names_of_other_machines_stay_words(make_cluster: Make) -> None:
    (_, second) = recipes(make_cluster(2, n1_interface="eth0; rm -rf /", n1_address="$(reboot)"))
    assert "GLOO_SOCKET_IFNAME=eth0; rm -rf /" in shlex.split(second.command)
    assert "--local-addr=$(reboot)" in shlex.split(second.c10d or "")


def test_without_node_0_there_is_nothing_to_copy(make_cluster: Make) -> None:
    cluster = make_cluster(2, own=1)
    del cluster.facts[0]
    assert recipes(cluster) == []
