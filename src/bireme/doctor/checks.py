"""All checks in the order of the report: what keeps a cluster from starting comes first."""

from bireme.doctor.checks_machine import MACHINE_CHECKS
from bireme.doctor.checks_network import NETWORK_CHECKS
from bireme.doctor.cluster import Check, Cluster


def examine(cluster: Cluster) -> list[Check]:
    """Pure: the same on every node that knows the same."""
    return [check for examination in (*NETWORK_CHECKS, *MACHINE_CHECKS) for check in examination(cluster)]


def passed(checks: list[Check]) -> bool:
    return all(check.status != "fail" for check in checks)
