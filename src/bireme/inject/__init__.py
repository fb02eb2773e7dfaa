"""Makes a rank, a node, a link or a stage slow on purpose, or fail, so that what is measured meets the truth."""

from bireme.inject.grammar import Injection, parse
from bireme.inject.injector import Injector
from bireme.inject.setting import Setting, resolve
from bireme.inject.straggler import Straggler

__all__ = ["Injection", "Injector", "Setting", "Straggler", "parse", "resolve"]
