"""The lock guard, and how values become comparable.

Owns: what "touching a shared object" means. Rules it keeps:

* A guarded object changes its class to a subclass that looks at every attribute access. Nothing is copied and the object keeps its
  identity, so the code under test cannot tell, and a guard costs nothing where none is installed.
* An access counts while a controlled thread runs. Building a scenario and looking at its end are free.
* Attributes that are primitives or functions are constants by nature; others are constants only when the caller names them, and
  then they may be read by anybody and written by nobody.
* What a thread reads is also what it *knows*. The reads of the operation that a thread is in are part of the search's state, which is
  what makes it sound to prune: two threads at the same place that have read the same values go on in the same way.
"""

from __future__ import annotations

import enum
from array import array
from collections import deque
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .world import World

_PLAIN = frozenset({int, str, bytes, float, bool, type(None), complex})
_CALLABLE = (FunctionType, MethodType, BuiltinFunctionType)
_CONTAINERS = (list, dict, set, deque, bytearray, array)
_get = object.__getattribute__


class Guard:
    """One guarded object: its lock, its constants, and its number in the world."""

    __slots__ = ("constants", "lock", "names", "number", "target", "world")

    def __init__(self, world: World, target: Any, lock: Any, constants: Iterable[str], number: int) -> None:
        self.world = world
        self.target = target
        self.lock = lock
        self.number = number
        self.names = set(attribute_names(target))
        self.constants = set(constants)
        unknown = self.constants - self.names
        if unknown:
            raise ValueError(f"{type(target).__name__} has no attribute {sorted(unknown)[0]!r} to be a constant")
        for name in self.names:
            value = getattr(target, name)
            if is_primitive(value) or isinstance(value, _CALLABLE):
                self.constants.add(name)

    def read(self, name: str, value: Any) -> None:
        world = self.world
        me = world.current
        if me is None or world.over or name not in self.names:
            return
        if name not in self.constants:
            if self.lock.owner is not me:
                self._violated("reads", name)
        elif not isinstance(value, _CONTAINERS):
            return
        place = (self.number, name)
        if place not in me.step_touched:
            me.step_touched.add(place)
            me.known.append((place, canon(value)))
            if isinstance(value, _CONTAINERS):
                me.aliases[id(value)] = value

    def write(self, name: str) -> None:
        world = self.world
        me = world.current
        if me is None or world.over:
            if not name.startswith("__"):
                self.names.add(name)
            return
        if name in self.constants:
            world.fail(
                "unguarded", f"{me.name} writes {type(self.target).__name__}.{name}, which was declared a constant"
            )
        if self.lock.owner is not me:
            self._violated("writes", name)
        self.names.add(name)
        me.step_touched.add((self.number, name))

    def _violated(self, verb: str, name: str) -> None:
        world = self.world
        owner = self.lock.owner
        holder = "nobody holds" if owner is None else f"{owner.name} holds"
        who = "" if world.current is None else world.current.name
        kind = type(self.target).__mro__[1].__name__
        world.fail("unguarded", f"{who} {verb} {kind}.{name} while {holder} its lock")

    def snapshot(self) -> tuple[Any, ...]:
        """The object's state, hashable; constants that cannot change are left out."""
        target = self.target
        values = []
        for name in sorted(self.names):
            value = _get(target, name)
            if name not in self.constants or isinstance(value, _CONTAINERS):
                values.append(canon(value))
        return tuple(values)


GUARDS: dict[int, Guard] = {}
"""Guards by the id of their object, which they keep alive. A world takes its own out again when it ends."""

_classes: dict[type, type] = {}


def guard_class(cls: type) -> type:
    """The subclass of `cls` whose instances are watched."""
    found = _classes.get(cls)
    if found is not None:
        return found

    source: Any = cls
    get, set_, delete = source.__getattribute__, source.__setattr__, source.__delattr__

    def __getattribute__(self: Any, name: str) -> Any:
        value = get(self, name)
        guard = GUARDS.get(id(self))
        if guard is not None:
            guard.read(name, value)
        return value

    def __setattr__(self: Any, name: str, value: Any) -> None:
        guard = GUARDS.get(id(self))
        if guard is not None:
            guard.write(name)
        set_(self, name, value)

    def __delattr__(self: Any, name: str) -> None:
        guard = GUARDS.get(id(self))
        if guard is not None:
            guard.write(name)
        delete(self, name)

    body = {
        "__slots__": (),
        "__module__": cls.__module__,
        "__getattribute__": __getattribute__,
        "__setattr__": __setattr__,
        "__delattr__": __delattr__,
    }
    made = type(f"Guarded{cls.__name__}", (cls,), body)
    _classes[cls] = made
    return made


def attribute_names(value: Any) -> list[str]:
    """The data attributes that `value` has now: its `__dict__` and its slots."""
    names = list(getattr(value, "__dict__", ()))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            name = f"_{cls.__name__.lstrip('_')}{slot}" if slot.startswith("__") and not slot.endswith("__") else slot
            if name not in ("__weakref__", "__dict__") and hasattr(value, name):
                names.append(name)
    return names


def is_primitive(value: Any) -> bool:
    """Whether `value` is a controlled lock, condition or event."""
    return getattr(type(value), "is_controlled_primitive", False)


def canon(value: Any, _path: tuple[int, ...] = ()) -> Any:
    """A hashable stand-in for `value`: equal for equal states.

    Containers and objects are taken apart; guarded objects and primitives are references; functions are their names. An object
    of a type with a `key()` method is what that says.
    """
    kind = type(value)
    if kind in _PLAIN or isinstance(value, enum.Enum):
        return value
    if isinstance(value, (tuple, list, deque)):
        return (kind.__name__, *[canon(item, _path) for item in value])
    if isinstance(value, dict):
        return (kind.__name__, *[(canon(k, _path), canon(v, _path)) for k, v in value.items()])
    if isinstance(value, (set, frozenset)):
        return frozenset([canon(item, _path) for item in value])
    guard = GUARDS.get(id(value))
    if guard is not None:
        return ("guarded", guard.number)
    if is_primitive(value):
        return ("primitive", value.number)
    if isinstance(value, (bytearray, memoryview, array)):
        return (kind.__name__, bytes(value))
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):
        return (str(value.dtype), getattr(value, "shape", ()), value.tobytes())
    if isinstance(value, BaseException):
        return (kind.__name__, str(value))
    if isinstance(value, (*_CALLABLE, type)):
        return ("callable", getattr(value, "__qualname__", repr(value)))
    if id(value) in _path:
        return ("again", len(_path) - _path.index(id(value)))
    if callable(getattr(kind, "key", None)):
        return (kind.__name__, canon(value.key(), (*_path, id(value))))
    path = (*_path, id(value))
    names = attribute_names(value) or list(getattr(kind, "__struct_fields__", ()))
    return (kind.__name__, *[(name, canon(_get(value, name), path)) for name in names])
