"""Modules that are loaded but not imported yet.

The template has torch in memory before the script runs, and a script must not be able to notice. Preloaded modules are
therefore removed from `sys.modules`, with the side effects of their import elsewhere, and returned, already executed,
when the script first imports them. The standard library stays: any Python program loads it.

A module that the script has not imported is not in `sys.modules`, and its warning filters and exit handlers are not
there. When the script imports it, all of them come at once, in the order in which they would have.

Modules come back in batches. One statement of the template loaded many modules, which hold references to each other; to
restore one of them and load the others anew would make two copies of a class, and `isinstance` would be false between
them. So a batch comes back whole when its own package is imported, and package by package otherwise.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.abc
import importlib.machinery
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any


class ImportSideEffects:
    """Effects of an import outside its modules: warning filters, exit handlers, loggers that can be disabled, variables
    of the environment."""

    def __init__(self) -> None:
        self.filters: list[Any] = []
        self.exits: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self.loggers: list[logging.Logger] = []
        self.environment: dict[str, str | None] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Collect the side effects of the imports in the body. Their exit handlers run after the script's until
        `repeat`."""
        filters, loggers, register = list(warnings.filters), set(logging.root.manager.loggerDict), atexit.register
        environment = dict(os.environ)

        def collect(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
            owner = getattr(function, "__module__", None) or ""  # a partial has none, an extension's function None
            if owner.partition(".")[0] not in {"", *sys.stdlib_module_names}:
                self.exits.append((function, args, kwargs))
            return register(function, *args, **kwargs)

        atexit.register = collect  # type: ignore[assignment]
        try:
            yield
        finally:
            atexit.register = register
        self.filters = [entry for entry in warnings.filters if not any(entry is known for known in filters)]
        made = logging.root.manager.loggerDict
        self.loggers = [log for name, log in made.items() if name not in loggers and isinstance(log, logging.Logger)]

        names = environment.keys() | os.environ.keys()
        self.environment = {n: os.environ.get(n) for n in names if environment.get(n) != os.environ.get(n)}

    def undo(self) -> None:
        """Take the effects back, as if nothing had been imported yet."""
        set_warning_filters([entry for entry in warnings.filters if entry not in self.filters])
        for function, _, _ in self.exits:
            atexit.unregister(function)

    def repeat_environment(self) -> None:
        """Repeat the changes of the environment."""
        for name, value in self.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def repeat(self) -> None:
        """Repeat the effects, as if the import happened now: its filters come first, its exit handlers run first."""
        set_warning_filters([*self.filters, *(entry for entry in warnings.filters if entry not in self.filters)])
        for function, args, kwargs in self.exits:
            atexit.register(function, *args, **kwargs)
        for log in self.loggers:  # a logging configuration disables the loggers it finds: these were not there yet
            log.disabled = False


def set_warning_filters(filters: list[Any]) -> None:
    if filters != warnings.filters:
        warnings.resetwarnings()  # the public way to invalidate every module's record of earlier warnings
        warnings.filters[:] = filters  # type: ignore[index]


class PreloadedBatch:
    """The modules that one preload statement loaded; `trigger` is the module it named."""

    def __init__(self, trigger: str) -> None:
        self.trigger = trigger
        self.modules: dict[str, ModuleType] = {}
        self.detached: list[tuple[ModuleType, str, ModuleType]] = []  # parent, attribute, child
        self.side_effects = ImportSideEffects()

    @property
    def top_package(self) -> str:
        return self.trigger.partition(".")[0]

    def comes_back_with(self, family: str, name: str) -> bool:
        """True if importing `family` brings the module `name` back.

        Extension modules create modules without a spec. Those below a package come with it (triton's); the others, of
        an unknown family, come with any of their batch.
        """
        top = name.partition(".")[0]
        return top == family or all(self._has_no_spec(known) for known in {top, name})

    def _has_no_spec(self, name: str) -> bool:
        module = self.modules.get(name)
        return module is None or module.__spec__ is None


class HiddenModules(importlib.abc.MetaPathFinder):
    """A finder, first on `sys.meta_path` until everything it hides has been imported."""

    def __init__(self) -> None:
        self.batches: list[PreloadedBatch] = []
        self.import_callbacks: dict[str, Callable[[], None]] = {}
        self.triggers_with_environment: frozenset[str] = frozenset()
        """Preload statements whose changes of the environment are the script's. torch's own are not: it imports less by
        itself than the template does."""

    @contextlib.contextmanager
    def recording_import_of(self, trigger: str) -> Iterator[None]:
        """The body imports `trigger`; the loaded modules disappear when `hide_all` is called."""
        batch, before = PreloadedBatch(trigger), set(sys.modules)
        with batch.side_effects.recording():
            yield
        # __mp_main__ is `multiprocessing`'s name for __main__, and the standard library stays
        stays = {"__mp_main__", *sys.stdlib_module_names}
        # In their order: Python ends modules in the reverse of it.
        batch.modules = {
            name: module
            for name, module in sys.modules.items()
            if name not in before and name.partition(".")[0] not in stays
        }
        self.batches.append(batch)

    def hide_all(self) -> None:
        """Make all that was loaded disappear. Called once, in the template, before the script's process begins."""
        for batch in self.batches:
            batch.side_effects.undo()
            for name, module in batch.modules.items():
                del sys.modules[name]
                parent_name, _, attribute = name.rpartition(".")
                parent = next((b.modules[parent_name] for b in self.batches if parent_name in b.modules), None)
                if parent is not None and parent_name not in batch.modules and parent.__dict__.get(attribute) is module:
                    batch.detached.append((parent, attribute, module))
                    delattr(parent, attribute)
        sys.meta_path.insert(0, self)

    def when_imported(self, name: str, then: Callable[[], None]) -> None:
        """Call `then` as soon as the hidden module `name` is imported."""
        if self.get_loaded(name) is not None:
            self.import_callbacks[name] = then

    def hidden_packages(self) -> set[str]:
        """Return the top-level packages that are hidden."""
        return {name.partition(".")[0] for batch in self.batches for name in batch.modules}

    def get_loaded(self, name: str) -> Any:
        """A hidden or imported module, without importing it; None if it was never loaded."""
        for batch in self.batches:
            if name in batch.modules:
                return batch.modules[name]
        return sys.modules.get(name)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        for batch in self.batches:
            if fullname in batch.modules:
                real = batch.modules[fullname].__spec__
                origin = real.origin if real else None
                spec = importlib.machinery.ModuleSpec(
                    fullname, HiddenModuleLoader(self, batch, fullname), origin=origin
                )
                if real is not None:
                    spec.submodule_search_locations = real.submodule_search_locations
                    spec.cached = real.cached
                    spec.has_location = real.has_location
                return spec
        return None

    def restore_for_import(self, batch: PreloadedBatch, name: str) -> None:
        """Put back what importing `name` would have loaded: its whole batch if it names one, else its own package.

        Earlier batches of other packages come too: torch's own import loads numpy.
        """
        family = name.partition(".")[0]
        if family != batch.top_package:
            back = [known for known in batch.modules if batch.comes_back_with(family, known)]
            self.put_back({known: batch.modules.pop(known) for known in back})
        else:
            if batch.trigger in self.triggers_with_environment:
                batch.side_effects.repeat_environment()
            for whole in [b for b in self.batches[: self.batches.index(batch)] if b.top_package != family] + [batch]:
                modules, whole.modules = whole.modules, {}
                whole.side_effects.repeat()
                for parent, attribute, child in whole.detached:
                    parent.__dict__.setdefault(attribute, child)
                self.put_back(modules)
        self.batches = [batch for batch in self.batches if batch.modules]
        if not self.batches and self in sys.meta_path:
            sys.meta_path.remove(self)

    def put_back_all(self) -> None:
        """Put what the script has not imported into `sys.modules`, as Python ends."""
        for batch in self.batches:
            sys.modules.update(batch.modules)

    def put_back(self, modules: dict[str, ModuleType]) -> None:
        """Put modules back into `sys.modules`, and call what waits for one of them."""
        for name, module in modules.items():
            sys.modules.setdefault(name, module)
        for name in modules.keys() & self.import_callbacks.keys():
            self.import_callbacks.pop(name)()


class HiddenModuleLoader(importlib.abc.Loader):
    """Returns a hidden module instead of loading it; otherwise behaves as the module's own loader."""

    def __init__(self, hidden: HiddenModules, batch: PreloadedBatch, name: str) -> None:
        self.hidden = hidden
        self.batch = batch
        self.module = batch.modules[name]
        self.name = name
        self.spec = self.module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        self.hidden.restore_for_import(self.batch, self.name)
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.spec.loader if self.spec is not None else None, attribute)
