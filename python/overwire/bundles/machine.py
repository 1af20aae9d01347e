"""Interprets untrusted pickles.

It supports only the opcodes that occur in bundles and torch.save files (protocols 2, 4 and 5). Python's unpickler sets
items of any object, calls anything, and trusts lengths. Here each opcode works only on certain exact types, and a
length must not exceed the data. The allow-list must permit all other actions, and the budget is charged for them.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from struct import unpack_from
from typing import Any

from ..errors import FormatError
from .allowlist import AllowList

_STOP, _MEMOIZE, _BINGET, _BININT1 = (code[0] for code in (pickle.STOP, pickle.MEMOIZE, pickle.BINGET, pickle.BININT1))


def _push_constant(value: Any) -> Callable[[Machine], None]:
    """Returns an opcode that pushes a constant."""

    def push_value(machine: Machine) -> None:
        machine._stack.append(value)

    return push_value


def _push_sized(width: int, make: Callable[[bytes], Any]) -> Callable[[Machine], None]:
    """Returns an opcode that reads a length of `width` bytes, reads that many bytes, and pushes an object made from
    them."""

    def push_bytes(machine: Machine) -> None:
        machine._stack.append(make(machine._read_blob(machine._read_number(width))))

    return push_bytes


def _decode_text(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def _decode_integer(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


class Machine:
    """Runs one pickle. The method `op_NAME` implements the opcode NAME of `pickle`.

    data: the pickle. allow: the rules for it. reference: returns the object for a persistent id.
    """

    def __init__(self, data: bytes, allow: AllowList, reference: Callable[[Any], Any]) -> None:
        self._data = data
        self._at = 0
        self._allow = allow
        self._budget = allow.budget
        self._reference = reference
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Returns the object. Raises UntrustedPickleError if the pickle does something that is not allowed, and any
        exception if it is malformed. `at` is the position of the error."""
        data, memo = self._data, self._memo
        while True:
            code = data[self._at]
            self._at += 1
            # The most frequent opcodes are handled here, because a function call would be slower.
            if code == _MEMOIZE:
                memo[len(memo)] = self._stack[-1]
            elif code == _BINGET:
                self._stack.append(memo[data[self._at]])
                self._at += 1
            elif code == _BININT1:
                self._stack.append(data[self._at])
                self._at += 1
            elif code == _STOP:
                return self._stack.pop()
            else:
                do = _DO[code]
                if do is None:
                    raise self._refuse_opcode(code)
                do(self)

    @property
    def at(self) -> int:
        """The offset after the last byte that was read."""
        return self._at

    # -- reading

    def _cut_short(self) -> FormatError:
        return FormatError("the pickle is truncated")

    def _refuse_opcode(self, code: int) -> Exception:
        if bytes((code,)) in _KNOWN:
            text = "it uses an opcode that save_bundle does not write"
            return self._budget.refuse(f"{text}, which is not on the allow-list")
        return FormatError(f"{code} is not an opcode")

    def _skip_bytes(self, count: int) -> int:
        """Skips `count` bytes and returns their offset. Raises FormatError if the data is shorter."""
        start = self._at
        if count > len(self._data) - start:
            raise self._cut_short()
        self._at = start + count
        return start

    def _read_number(self, size: int) -> int:
        start = self._skip_bytes(size)
        return int.from_bytes(self._data[start : start + size], "little")

    def _read_line(self) -> str:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise self._cut_short()
        start, self._at = self._at, end + 1
        return self._data[start:end].decode()

    def _read_blob(self, size: int) -> bytes:
        start = self._skip_bytes(size)
        return self._data[start : start + size]

    def _pop_items(self) -> list[Any]:
        """Returns the objects that were pushed since the last mark."""
        items = self._stack
        self._stack = self._marks.pop()
        return items

    # -- frames, marks and memory

    def op_proto(self) -> None:
        if self._read_number(1) > pickle.HIGHEST_PROTOCOL:
            raise FormatError("the pickle has a newer protocol")

    def op_frame(self) -> None:
        # Frames are ignored, but their bytes must exist.
        if self._read_number(8) > len(self._data) - self._at:
            raise self._cut_short()

    def op_mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def op_pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_items()

    def op_pop_mark(self) -> None:
        self._pop_items()

    def op_binput(self) -> None:
        self._memo[self._read_number(1)] = self._stack[-1]

    def op_long_binput(self) -> None:
        self._memo[self._read_number(4)] = self._stack[-1]

    def op_long_binget(self) -> None:
        self._stack.append(self._memo[self._read_number(4)])

    # -- plain values

    op_none, op_newtrue, op_newfalse = map(_push_constant, (None, True, False))

    def op_binint(self) -> None:
        self._stack.append(unpack_from("<i", self._data, self._skip_bytes(4))[0])

    def op_binint2(self) -> None:
        start = self._skip_bytes(2)
        self._stack.append(self._data[start] | self._data[start + 1] << 8)

    op_long1 = _push_sized(1, _decode_integer)

    def op_long4(self) -> None:
        size = unpack_from("<i", self._data, self._skip_bytes(4))[0]
        if size < 0:
            raise FormatError("an integer has a negative length")
        self._stack.append(_decode_integer(self._read_blob(size)))

    def op_binfloat(self) -> None:
        self._stack.append(unpack_from(">d", self._data, self._skip_bytes(8))[0])

    def op_short_binunicode(self) -> None:
        start = self._at + 1
        end = self._at = start + self._data[self._at]
        if end > len(self._data):
            raise self._cut_short()
        self._stack.append(str(self._data[start:end], "utf-8", "surrogatepass"))

    op_binunicode, op_binunicode8 = _push_sized(4, _decode_text), _push_sized(8, _decode_text)
    op_short_binbytes, op_binbytes, op_binbytes8 = _push_sized(1, bytes), _push_sized(4, bytes), _push_sized(8, bytes)
    op_bytearray8 = _push_sized(8, bytearray)

    # -- containers

    def op_empty_tuple(self) -> None:
        self._stack.append(())

    def op_tuple1(self) -> None:
        self._stack[-1] = (self._stack[-1],)

    def op_tuple2(self) -> None:
        last = self._stack.pop()
        self._stack[-1] = (self._stack[-1], last)

    def op_tuple3(self) -> None:
        last = self._stack.pop()
        middle = self._stack.pop()
        self._stack[-1] = (self._stack[-1], middle, last)

    def op_tuple(self) -> None:
        items = self._pop_items()
        self._stack.append(tuple(items))

    def op_empty_list(self) -> None:
        self._stack.append([])

    def op_append(self) -> None:
        item = self._stack.pop()
        self._growing_target().append(item)

    def op_appends(self) -> None:
        items = self._pop_items()
        self._growing_target().extend(items)

    def _growing_target(self) -> Any:
        target = self._stack[-1]
        if type(target) is not list and type(target) is not deque:
            raise self._allow.wrong("appends to", target)
        return target

    def op_empty_dict(self) -> None:
        self._stack.append({})

    def op_setitem(self) -> None:
        value = self._stack.pop()
        self._set_items([self._stack.pop(), value])

    def op_setitems(self) -> None:
        self._set_items(self._pop_items())

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        kind = type(target)
        if kind is not dict and kind is not OrderedDict and kind is not defaultdict:
            raise self._allow.wrong("sets an item of", target)
        keys, values = items[::2], items[1::2]
        self._budget.keys(target, keys)
        if kind is defaultdict:
            self._budget.nest(target, values)
        for key, value in zip(keys, values, strict=True):
            target[key] = value

    def op_empty_set(self) -> None:
        self._stack.append(set())

    def op_additems(self) -> None:
        items = self._pop_items()
        target = self._stack[-1]
        if type(target) is not set:
            raise self._allow.wrong("adds items to", target)
        self._budget.keys(target, items)
        target.update(items)

    def op_frozenset(self) -> None:
        items = self._pop_items()
        self._budget.keys(items, items)
        self._stack.append(frozenset(items))

    # -- opcodes that the allow-list decides about

    def op_global(self) -> None:
        module = self._read_line()
        self._stack.append(self._allow.find(module, self._read_line()))

    def op_stack_global(self) -> None:
        name = self._stack.pop()
        module = self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise FormatError("a name is not a str")
        self._stack.append(self._allow.find(module, name))

    def op_reduce(self) -> None:
        args = self._stack.pop()
        if type(args) is not tuple:
            raise FormatError("arguments are not a tuple")
        self._stack[-1] = self._allow.call(self._stack[-1], args)

    def op_newobj(self) -> None:
        args = self._stack.pop()
        if type(args) is not tuple:
            raise FormatError("arguments are not a tuple")
        self._stack[-1] = self._allow.new(self._stack[-1], args)

    def op_build(self) -> None:
        state = self._stack.pop()
        self._allow.set_state(self._stack[-1], state)

    def op_binpersid(self) -> None:
        self._stack[-1] = self._reference(self._stack[-1])


_KNOWN = frozenset(getattr(pickle, name) for name in pickle.__all__ if type(getattr(pickle, name)) is bytes)

# The function for each opcode.
_DO: list[Callable[[Machine], None] | None] = [None] * 256
for _name, _method in vars(Machine).items():
    if _name.startswith("op_"):
        _DO[getattr(pickle, _name[3:].upper())[0]] = _method
