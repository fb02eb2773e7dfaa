"""Will the nodes find and reach each other? Pure: from the facts of all nodes to checks."""

from collections.abc import Iterator

from bireme.doctor.cluster import Check, Cluster, Status
from bireme.doctor.facts import DEFAULT_PORT, Card, Facts, Name
from bireme.errors import UserError
from bireme.network import Endpoint, is_loopback
from bireme.text import count, listed, shell


def peers(cluster: Cluster) -> Iterator[Check]:
    """Who did not answer."""
    if cluster.trouble:
        yield Check("peers", "fail", cluster.trouble, (cluster.label(cluster.own),), _meeting_fix(cluster))
    for index, why in sorted(cluster.silent.items()):
        if index == 0 and cluster.trouble:
            continue
        label = cluster.label(index)
        fix = f"on {label}: bireme doctor, at the same time as here; then look at its output"
        if why.startswith("its doctor runs"):
            fix = f"on {cluster.label(0)}: sudo ufw allow from {shell(label)}"
        elif cluster.trouble:
            fix = ""
        yield Check("peers", "fail", f"{label} is silent: {why}", (label,), fix)
    if not cluster.alone and not cluster.silent and not cluster.trouble:
        yield Check("peers", "pass", f"all {cluster.size} nodes answered")


def _meeting_fix(cluster: Cluster) -> str:
    own = cluster.facts[cluster.own]
    if own.master is None:
        return ""
    if "different jobs" in (cluster.trouble or ""):
        return "on every node: env | grep -E '^(NNODES|NODE_RANK|WORLD_SIZE|MASTER_|TORCHELASTIC_RUN_ID|SLURM_JOB)'"
    host = own.master.addresses[0] if own.master.addresses else own.master.name
    if cluster.own == 0:
        return "bireme doctor --port 29600 ... (the same on every node)"
    if "no answer" not in (cluster.trouble or ""):
        return f"on {cluster.label(0)}: bireme doctor, at the same time as here; then look at its output"
    return (
        f"nc -vz {shell(host)} {own.master_port} (from {cluster.label(cluster.own)}, while the doctor runs on "
        f"{cluster.label(0)}); a firewall there: sudo ufw allow from {shell(own.address or 'THIS-NODE')}"
    )


def own_name(cluster: Cluster) -> Iterator[Check]:
    """gloo and torchrun announce what a node's own name resolves to, unless they are told better."""
    good = []
    severity: Status = "warn" if cluster.alone else "fail"
    for label, facts in cluster.each():
        name, problem = facts.host, None
        own = {card_address.partition("/")[0] for card in facts.cards for card_address in card.addresses}
        routable = [each for each in name.addresses if not is_loopback(each)]
        if name.error or not name.addresses:
            problem = f"its own host name {name.name} does not resolve ({name.error or 'no address'})"
        elif cluster.on_one_machine and not cluster.alone:
            pass
        elif is_loopback(name.addresses[0]):
            problem = (
                f"its own host name {name.name} resolves to {name.addresses[0]}, which no other node can reach: "
                "gloo and torchrun would announce it"
            )
        elif not own & set(routable):
            problem = (
                f"its own host name {name.name} resolves to {listed(routable)}, an address that no network card "
                f"here has"
            )
        if problem is None:
            good.append(f"{label} is {name.addresses[0]}")
            continue
        line = f"{_address_or(facts)} {name.name}"
        fix = f"on {label}, /etc/hosts: remove {name.name} from the loopback line, and add: {line}"
        yield Check("own name", severity, f"{label}: {problem}", (label,), fix)
    if len(good) == len(cluster.facts):
        yield Check("own name", "pass", listed(good))


def _address_or(facts: Facts) -> str:
    """The node's address that others reach; a placeholder where none is known."""
    if facts.address and not is_loopback(facts.address):
        return facts.address
    real = [
        address.partition("/")[0]
        for card in facts.cards
        if card.up
        for address in card.addresses
        if not is_loopback(address.partition("/")[0]) and not address.startswith("fe80")
    ]
    return real[0] if real else "THIS-NODE'S-ADDRESS"


def interface(cluster: Cluster) -> Iterator[Check]:
    """Which card leads to the others, and whether the variables of gloo and NCCL name it."""
    good = []
    found = False
    for label, facts in cluster.each():
        problems = list(_variable_problems(cluster, facts))
        if facts.interface_error and not (cluster.alone or problems):
            problems.append((facts.interface_error, ""))
        for problem, fix in problems:
            found = True
            yield Check("interface", "fail", f"{label}: {problem}", (label,), f"on {label}: {fix}" if fix else "")
        for warning in facts.interface_warnings:
            found = True
            fix = f"on {label}: export GLOO_SOCKET_IFNAME={shell(facts.interface or '')}"
            yield Check("interface", "warn", f"{label}: {warning}", (label,), fix)
        if facts.interface:
            good.append(f"{label} {facts.address} via {facts.interface}")
    if not found:
        yield Check("interface", "pass", listed(good) or "no network is needed on one machine")


def _variable_problems(cluster: Cluster, facts: Facts) -> Iterator[tuple[str, str]]:
    cards = {card.name: card for card in facts.cards}
    right = facts.interface
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = facts.variables.get(variable, "")
        if not value:
            continue
        exact = "=" if variable == "NCCL_SOCKET_IFNAME" else ""
        fix = f"export {variable}={exact}{shell(right)}" if right else f"unset {variable}"
        meant = _matching(value, facts.cards) if exact else [word.strip() for word in value.split(",")]
        there = [name for name in meant if name in cards]
        usual = right and not is_loopback(facts.address or "")
        if not there or (not exact and len(there) < len(meant)):
            names = listed([card.name for card in facts.cards if card.addresses])
            yield f"{variable}={value} names no network interface of this node (there are {names})", fix
        elif not any(cards[name].up for name in there):
            yield f"{variable}={value}: this interface is down", fix
        elif usual and all(_is_loopback(cards[name]) for name in there) and not cluster.alone:
            yield f"{variable}={value} is the loopback interface: the way to the other nodes is {right}", fix
        elif usual and not cluster.alone and right not in there:
            yield f"{variable}={value}, but the way to the other nodes is {right} ({facts.address})", fix


def _matching(value: str, cards: list[Card]) -> list[str]:
    """NCCL's rule: names are prefixes, = makes them exact, ^ excludes."""
    exclude, rest = value.startswith("^"), value.lstrip("^")
    exact, words = rest.startswith("="), [word for word in rest.lstrip("=").split(",") if word]

    def named(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in words)

    return [card.name for card in cards if card.addresses and named(card.name) != exclude]


def _is_loopback(card: Card) -> bool:
    return bool(card.addresses) and all(is_loopback(address.partition("/")[0]) for address in card.addresses)


def connections(cluster: Cluster) -> Iterator[Check]:
    """TCP to the ephemeral port of each peer, in both directions."""
    good = blocked = 0
    works = {(index, reach.to) for index, facts in cluster.facts.items() for reach in facts.reaches if not reach.error}
    faults: dict[tuple[int, str, str], list[int]] = {}
    for index, facts in sorted(cluster.facts.items()):
        for reach in facts.reaches:
            if reach.error:
                faults.setdefault((reach.to, reach.address, reach.error), []).append(index)
            else:
                good += 1
    for (to, address, error), origins in faults.items():
        blocked += len(origins)
        target = cluster.label(to)
        names = [cluster.label(each) for each in origins]
        back = [each for each in origins if (to, each) in works]
        message = f"{listed(names)} -> {target} ({address}, an ephemeral port) is blocked: {error}"
        if back:
            message += f"; {target} -> {listed([cluster.label(each) for each in back])} works"
        sources = [cluster.facts[each].address for each in origins]
        allow = "; ".join(f"sudo ufw allow from {shell(each)}" for each in sources[:4] if each)
        yield Check("connections", "fail", message, (*names, target), f"on {target}: {allow}")
    if good and not blocked:
        yield Check("connections", "pass", f"TCP on ephemeral ports works in all {good} directions")
    elif not cluster.alone and not good and not blocked:
        yield Check("connections", "warn", "not tried: no other node was met", (cluster.label(cluster.own),))


def ports(cluster: Cluster) -> Iterator[Check]:
    """The ports of the node where the others will meet."""
    facts = cluster.first
    if facts is None:
        return
    label, good = cluster.label(0), []
    for each in facts.ports:
        owner = each.owner or "a process that only root can see"
        if each.free:
            good.append(f"{each.port} is free")
        elif each.ours:
            good.append(f"{each.port} is held by the launcher, as it should be")
        elif each.port == facts.master_port:
            other = f"--master-port={facts.free_port}" if facts.free_port else "another --master-port"
            fix = f"use {other}; or look: sudo ss -ltnp 'sport = :{each.port}'"
            yield Check("ports", "fail", f"port {each.port} on {label} is held by {owner}", (label,), fix)
        else:
            message = f"port {each.port} on {label}, the default of torchrun's c10d rendezvous, is held by {owner}"
            yield Check("ports", "warn", message, (label,), f"--rdzv-endpoint={label}:{facts.free_port or 'PORT'}")
    if len(good) == len(facts.ports):
        yield Check("ports", "pass", f"on {label} " + ", ".join(good))


def announced_name(cluster: Cluster) -> Iterator[Check]:
    """The master's name must mean node 0 on every other node: the given one, and the one that c10d would announce."""
    first = cluster.first
    if cluster.alone or first is None:
        return
    own = {address.partition("/")[0] for card in first.cards for address in card.addresses} | {first.address}
    good = True
    for index, facts in sorted(cluster.facts.items()):
        if index == 0:
            continue
        label = cluster.label(index)
        same_machine = facts.machine == first.machine
        if facts.master is not None and (why := _misleads(facts.master, own, same_machine)):
            good = False
            # A master behind address translation is met all the same.
            met = facts.clock is not None and not cluster.by_agent and "loopback" not in why
            fix = f"on {label}, /etc/hosts: {_address_or(first)} {facts.master.name}"
            text = f"{label}: the master {facts.master.name} {why}"
            yield Check("announced name", "warn" if met else "fail", text, (label,), fix)
        for name in facts.peer_names:
            if name.name != first.full_name.name or (facts.master and name.name == facts.master.name):
                continue
            if why := _misleads(name, own, same_machine):
                good = False
                text = f"{label}: torchrun's c10d would announce {name.name} for {cluster.label(0)}, which {why}"
                fix = f"on {cluster.label(0)}: torchrun --local-addr={_address_or(first)} ... (as below)"
                yield Check("announced name", "warn", text, (label,), fix)
    if good and len(cluster.facts) > 1:
        given = first.master.name if first.master else first.full_name.name
        yield Check("announced name", "pass", f"every node finds {cluster.label(0)} by the name {given}")


def _misleads(name: Name, own: set[str | None], same_machine: bool) -> str | None:
    if name.error or not name.addresses:
        return f"does not resolve there ({name.error or 'no address'})"
    if is_loopback(name.addresses[0]):
        return None if same_machine else f"resolves to the loopback address {name.addresses[0]} there"
    if not own & set(name.addresses):
        return f"resolves to {listed(name.addresses)} there, which is not an address of that node"
    return None


def ipv6(cluster: Cluster) -> Iterator[Check]:
    """Brackets and ports that stick to MASTER_ADDR; nodes without a common kind of address."""
    good = True
    for label, facts in cluster.each():
        text = facts.variables.get("MASTER_ADDR", "")
        try:
            host = Endpoint.parse(text, DEFAULT_PORT).host if text else ""
        except UserError:
            host = text
            good = False
            fix = f"on {label}: export MASTER_ADDR={shell(_address_or(facts))}"
            yield Check("IPv6", "fail", f"{label}: MASTER_ADDR={text} is neither a name nor an address", (label,), fix)
        if host != text:
            good = False
            what = "is in brackets" if text.startswith("[") and text.endswith("]") else "has a port stuck to it"
            fix = f"on {label}: export MASTER_ADDR={shell(host)}"
            yield Check("IPv6", "fail", f"{label}: MASTER_ADDR={text} {what}", (label,), fix)
    kinds = {label: ":" in facts.address for label, facts in cluster.each() if facts.address}
    if len(set(kinds.values())) > 1:
        good = False
        names = [[label for label, six in kinds.items() if six is each] for each in (True, False)]
        text = f"{listed(names[0])} would use IPv6, but {listed(names[1])} IPv4"
        yield Check("IPv6", "fail", text, tuple(kinds), "use the same kind of address for all nodes in --peers")
    if good:
        six = any(kinds.values())
        note = "addresses are IPv6: in brackets before a port" if six else "addresses are IPv4, nothing to bracket"
        yield Check("IPv6", "pass", note)


def packet_size(cluster: Cluster) -> Iterator[Check]:
    """Nodes with different MTUs: small messages pass and large ones hang where the path drops big packets."""
    sizes = {}
    for label, facts in cluster.each():
        for card in facts.cards:
            if card.name == facts.interface and not _is_loopback(card):
                sizes[label] = card.mtu_bytes
    if len(set(sizes.values())) > 1:
        text = "packet sizes (MTU) differ: " + listed([f"{label} {size}" for label, size in sizes.items()])
        least = min(sizes.values())
        odd = tuple(label for label, size in sizes.items() if size != least)
        names = {label: facts.interface or "eth0" for label, facts in cluster.each()}
        fix = f"on {odd[0]}: sudo ip link set {shell(names[odd[0]])} mtu {least}"
        yield Check("packet size", "warn", text, odd, fix)
    elif len(sizes) > 1:
        yield Check("packet size", "pass", f"MTU {next(iter(sizes.values()))} on {count(len(sizes), 'node')}")


NETWORK_CHECKS = (peers, own_name, interface, connections, ports, announced_name, ipv6, packet_size)
