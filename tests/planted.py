"""Faults to plant on an emulated node, as programs to run there."""

import sys

from bireme.nodes import Node

# Debian's line: the machine's own name leads to itself alone.
HOSTS = """
import socket
from pathlib import Path
name, hosts = socket.gethostname(), Path("/etc/hosts")
others = [line for line in hosts.read_text().splitlines() if name not in line.split()]
hosts.write_text("\\n".join([*others, f"127.0.1.1 {name}"]) + "\\n")
"""

# A second card that leads nowhere, as of a VPN that is down, whose address the machine's own name resolves to.
SECOND_CARD = """
import socket
from pathlib import Path
from pyroute2 import IPRoute
name, hosts = socket.gethostname(), Path("/etc/hosts")
with IPRoute() as route:
    route.link("add", ifname="aaa0", kind="veth", peer={"ifname": "loose"})
    index = route.link_lookup(ifname="aaa0")[0]
    route.addr("add", index=index, address="172.31.0.1", prefixlen=24)
    route.link("set", index=index, state="up")
others = [line for line in hosts.read_text().splitlines() if name not in line.split()]
hosts.write_text("\\n".join([*others, f"172.31.0.1 {name}"]) + "\\n")
"""

# Every connection request (SYN without ACK) that leaves is dropped; answers pass. No firewall is needed for that.
BLOCK = """
import subprocess
for command in (
    "qdisc del dev eth0 root",
    "qdisc add dev eth0 root handle 5: htb default 2",
    "class add dev eth0 parent 5: classid 5:1 htb rate 1gbit quantum 1514",
    "class add dev eth0 parent 5: classid 5:2 htb rate 1gbit quantum 1514",
    "qdisc add dev eth0 parent 5:1 handle 10: blackhole",
    "filter add dev eth0 parent 5: protocol ip prio 1 u32 match ip protocol 6 0xff match u8 0x02 0x12 at 33 flowid 5:1",
):
    subprocess.run(["tc", *command.split()], check=True)
"""


def on(node: Node, program: str) -> int:
    """The exit code of a Python program on a node."""
    return node.start([sys.executable, "-c", program]).wait(60)
