"""Calls a function when a module has been imported, without importing it: a script may set things up before."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, call: Callable[[ModuleType], None]) -> None:
    """`call(module)`, now where it is imported already."""
    if name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, call))


class _Finder(MetaPathFinder):
    def __init__(self, name: str, call: Callable[[ModuleType], None]):
        self._name = name
        self._call = call
        self._asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:  # many ask only whether there is one
            spec.loader = _Loader(spec.loader, self, self._call)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader, finder: MetaPathFinder, call: Callable[[ModuleType], None]):
        self._loader = loader
        self._finder = finder
        self._call = call

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # As if it had been its own loader: what reads the source of a module asks it.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._loader.exec_module(module)
        self._call(module)
