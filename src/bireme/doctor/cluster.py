"""What the checks look at (the facts of all nodes that answered) and what they say."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from bireme.doctor.facts import Facts
from bireme.network import is_loopback

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `fix`: commands or lines of files to copy; empty where nothing needs to be done."""

    name: str
    status: Status
    message: str
    nodes: tuple[str, ...] = ()
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "nodes": list(self.nodes)}


@dataclass(slots=True)
class Cluster:
    """All that one doctor knows. `silent`: why nothing is known of a node."""

    size: int
    own: int
    facts: dict[int, Facts]
    silent: dict[int, str] = field(default_factory=dict)
    trouble: str | None = None  # why this node could not take part to the end
    labels: dict[int, str] = field(default_factory=dict)  # names of nodes that did not say theirs
    by_agent: bool = False  # torchrun's agents run now, and announced the master's name already

    def label(self, index: int) -> str:
        """The node's name; with its number where two have the same."""
        if index not in self.facts:
            return self.labels.get(index, f"node {index}")
        name = self.facts[index].name
        twins = sum(each.name == name for each in self.facts.values())
        return name if twins == 1 else f"{name} (node {index})"

    def each(self) -> list[tuple[str, Facts]]:
        return [(self.label(index), self.facts[index]) for index in sorted(self.facts)]

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def on_one_machine(self) -> bool:
        """Whether all nodes are processes of one machine: there loopback is a network like any other."""
        everybody = not self.silent or all(is_loopback(each.address or "") for each in self.facts.values())
        return everybody and len({each.machine for each in self.facts.values()}) == 1

    @property
    def first(self) -> Facts | None:
        """Node 0's facts; None where it is silent."""
        return self.facts.get(0)
