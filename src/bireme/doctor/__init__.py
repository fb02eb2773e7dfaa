"""Will this cluster start, and will it be fast? `bireme doctor` (docs/doctor.md)."""

from bireme.doctor.command import doctor_command

__all__ = ["doctor_command"]
