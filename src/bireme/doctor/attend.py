"""The meeting itself: this node tells what it knows, learns what the others know, and tries the way to each of them."""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bireme.doctor.board import Board, Visitor
from bireme.doctor.dial import Dialer, answer_dials
from bireme.doctor.facts import Facts, Reach, Seen, facts_from_json, seen_from_json
from bireme.doctor.machine import advertise, look_up_all, outward_address
from bireme.doctor.meeting import Plan, addresses_to_listen_on
from bireme.doctor.reach import Answerer, reach_all
from bireme.doctor.wire import WireError
from bireme.errors import UserError
from bireme.network import Endpoint, is_loopback, local_address_towards
from bireme.text import printable

_CONNECT_S = 2.5  # a dropped connection request is repeated after 1 s
_STAGE_S = 3.5  # for all connections, and for telling about them
_LEAVE_S = 1.0


@dataclass(slots=True)
class Attendance:
    """What became of the meeting: facts by index, why others are silent, and why this node met nobody (if so)."""

    facts: dict[int, Facts]
    silent: dict[int, str] = field(default_factory=dict)
    trouble: str | None = None


def attend(plan: Plan, facts: Facts, now_ns: Callable[[], int], deadline_s: float) -> Attendance:
    """Meets the others until `deadline_s` at the latest; trying the connections takes a few seconds more. Never raises
    for what others do or fail to do."""
    if plan.how == "alone":
        advertise(facts, outward_address())
        return Attendance({facts.index: facts})
    answerer = Answerer(plan.meeting)
    try:
        if plan.meeting.index == 0:
            return _receive_visitors(plan, facts, now_ns, deadline_s, answerer)
        return _visit(plan, facts, now_ns, deadline_s, answerer)
    finally:
        answerer.close()


# --- node 0 -------------------------------------------------------------------------------------------------------


def _receive_visitors(
    plan: Plan, facts: Facts, now_ns: Callable[[], int], deadline_s: float, answerer: Answerer
) -> Attendance:
    board = Board(plan.meeting, now_ns, _checked)
    others = frozenset(range(1, plan.meeting.size))
    board.expect("facts", others | {0}, deadline_s + 1.0)
    try:
        ports = _open_board(plan, facts, board)
        if not ports:
            advertise(facts, outward_address())
            trouble = _cannot_listen(plan, facts)
            return Attendance({0: facts}, dict.fromkeys(others, "could not be asked"), trouble)
        if plan.how == "agent":
            _publish(plan, ports, deadline_s)
        dialer = Dialer(plan, board.local_addresses.keys()) if plan.how == "peers" else None
        board.arrived("facts", others, deadline_s)
        came = board.known("facts")
        reached_at = list(dict.fromkeys(board.local_addresses[index] for index in sorted(came)))
        _take_part(facts, answerer, reached_at or list(ports))
        silent = {}
        for index in sorted(others - came):
            found = dialer.what_of(index) if dialer else None
            silent[index] = board.refused.get(index) or found or _never_came(ports)
        if dialer:
            dialer.close()
        board.expect("silent", frozenset({0}), deadline_s + 1.0)
        board.put("silent", 0, {str(index): text for index, text in silent.items()})
        board.put("facts", 0, facts.to_json())
        members = came | {0}
        stage_s = time.monotonic() + _STAGE_S
        board.expect("seen", members, stage_s)
        board.expect("facts", members, stage_s)
        known = {index: facts_from_json(value) for index, value in board.get("facts").items()}
        known[0] = facts
        seen = _look_around(plan, known, None)
        board.put("seen", 0, _seen_json(seen))
        _note(known, board.get("seen"), silent)
        board.wait_until_left(time.monotonic() + _LEAVE_S)
        return Attendance(known, silent)
    finally:
        board.close()


def _open_board(plan: Plan, facts: Facts, board: Board) -> dict[str, int]:
    ports: dict[str, int] = {}
    for address in addresses_to_listen_on(plan, facts.master.addresses if facts.master else []):
        with contextlib.suppress(OSError):
            ports[address] = board.open(address, plan.board_ports)
    return ports


def _publish(plan: Plan, ports: dict[str, int], deadline_s: float) -> None:
    """In a thread of its own: the store's client knows no short time-outs, and torch takes seconds to load."""
    from bireme.doctor import agent_store

    def publish() -> None:
        with contextlib.suppress(WireError, RuntimeError):
            stores.append(agent_store.publish(plan.master or "", plan.master_port, ports, deadline_s))

    stores: list[Any] = []
    threading.Thread(target=publish, daemon=True).start()


def _cannot_listen(plan: Plan, facts: Facts) -> str:
    where = facts.master
    if where is None or where.error:
        return f"node 0 cannot listen at {plan.master}: {where.error if where else 'no name'}"
    tried = f"{plan.board_ports[0]}-{plan.board_ports[-1]}"
    return f"node 0 cannot listen at {plan.master} ({', '.join(where.addresses)}), ports {tried}: all are taken"


def _never_came(ports: dict[str, int]) -> str:
    listening = [address for address in ports if not is_loopback(address)] or list(ports)
    where = " and ".join(f"{address} port {ports[address]}" for address in listening)
    return f"did not come to {where}: its doctor was not started, or hangs, or its way to there is blocked"


def _checked(stage: str, index: int, value: Any) -> Any:
    if stage == "facts":
        facts = facts_from_json(value)
        facts.index = index
        return facts.to_json()
    if stage == "seen":
        return _seen_json(seen_from_json(value))
    raise UserError("the doctors are of different versions of Bireme")


# --- every other node ---------------------------------------------------------------------------------------------


def _visit(plan: Plan, facts: Facts, now_ns: Callable[[], int], deadline_s: float, answerer: Answerer) -> Attendance:
    own = plan.meeting.index
    silent = {index: "not known: node 0 was not met" for index in range(plan.meeting.size) if index not in (0, own)}
    late_s = deadline_s + _STAGE_S + _LEAVE_S
    known = {own: facts}
    visitor = None
    if plan.how == "peers":
        answer_dials(plan, answerer)
    try:
        hosts, ports = _where(plan, deadline_s)
        visitor = Visitor(plan.meeting, hosts, ports, deadline_s)
        facts.clock = visitor.clock(now_ns, late_s)
        _take_part(facts, answerer, [visitor.local_address])
        visitor.put("facts", facts.to_json(), late_s)
        told = visitor.get("facts", late_s)
        if own not in told or 0 not in told:
            raise WireError("this node came too late: the others had stopped waiting")
        known |= {index: facts_from_json(value) for index, value in told.items() if index != own}
        silent = _silent_from(visitor.get("silent", late_s), plan.meeting.size)
        seen = _look_around(plan, known, visitor.board_address)
        visitor.put("seen", _seen_json(seen), late_s)
        _note(known, visitor.get("seen", late_s), silent)
        return Attendance(known, silent)
    except (WireError, UserError) as error:
        if facts.address is None:
            _advertise_towards(plan, facts)
        if 0 not in known:
            silent[0] = str(error)
            way = f"{plan.label(own)} -> {plan.label(0)} ({Endpoint(plan.master or '', plan.master_port)})"
            return Attendance(known, silent, f"{plan.label(0)} was not met: {way}: {error}")
        return Attendance(known, silent, f"{plan.label(0)} fell silent during the meeting: {error}")
    finally:
        if visitor is not None:
            visitor.close()


def _where(plan: Plan, deadline_s: float) -> tuple[list[str], list[int]]:
    """Where node 0's board is."""
    assert plan.master is not None
    if plan.how != "agent":
        return [plan.master], plan.board_ports
    from bireme.doctor import agent_store

    results: list[dict[str, int]] = []
    errors: list[str] = []

    def find() -> None:
        try:
            results.append(agent_store.find(plan.master or "", plan.master_port, deadline_s - 0.5))
        except (WireError, RuntimeError) as error:
            errors.append(str(error).splitlines()[0])

    thread = threading.Thread(target=find, daemon=True)
    thread.start()
    thread.join(max(0.1, deadline_s - time.monotonic()))
    if not results:
        raise WireError(errors[0] if errors else "torchrun's store did not say where its doctor is")
    # A loopback address is node 0's only where this is the same machine: tried last.
    hosts = sorted(results[0], key=is_loopback)
    return hosts, sorted(set(results[0].values()))


def _advertise_towards(plan: Plan, facts: Facts) -> None:
    addresses = facts.master.addresses if facts.master else []
    found = [local_address_towards(address) for address in addresses]
    advertise(facts, next((each for each in found if each), None) or outward_address())


def _silent_from(told: dict[int, Any], size: int) -> dict[int, str]:
    table = told.get(0)
    if not isinstance(table, dict):
        return {}
    known = {str(index): index for index in range(size)}
    return {known[text]: printable(str(why)[:300]) for text, why in table.items() if text in known}


# --- both ---------------------------------------------------------------------------------------------------------


def _take_part(facts: Facts, answerer: Answerer, addresses: list[str]) -> None:
    """Settles this node's address and listens on the ephemeral ports that the others will try."""
    advertise(facts, next((each for each in addresses if not is_loopback(each)), addresses[0]))
    for address in addresses:
        with contextlib.suppress(OSError):
            facts.listens[address] = answerer.open(address)


def _look_around(plan: Plan, known: dict[int, Facts], board_address: str | None) -> Seen:
    """Tries every other node's ephemeral port, and what node 0's names mean here."""
    targets, reaches = {}, []
    for index, facts in known.items():
        if index == plan.meeting.index:
            continue
        # Node 0 has an address in every network from which it was met.
        address = board_address if index == 0 and board_address in facts.listens else facts.address
        if address is None or address not in facts.listens:
            reaches.append(Reach(index, address or "no address", None, "it could not listen on its address"))
        else:
            targets[index] = (address, facts.listens[address])
    reaches += reach_all(plan.meeting, targets, time.monotonic() + _CONNECT_S)
    names = [known[0].full_name.name, known[0].host.name] if plan.meeting.index != 0 else []
    return Seen(reaches, list(look_up_all(list(dict.fromkeys(names))).values()))


def _note(known: dict[int, Facts], told: dict[int, Any], silent: dict[int, str]) -> None:
    for index, facts in known.items():
        if index in told:
            seen = seen_from_json(told[index])
            facts.reaches, facts.peer_names = seen.reaches, seen.peer_names
        else:
            silent[index] = "came to the meeting and then fell silent"


def _seen_json(seen: Seen) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(seen)
