"""Reads the exports, required libraries and symbol versions of a shared library.

It supports only little-endian ELF64, and only the parts that the audit of a wheel needs. It reads the section headers,
which all linkers write and `-s` does not remove.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

SHT_DYNAMIC, SHT_DYNSYM, SHT_GNU_VERNEED = 6, 11, 0x6FFFFFFE
DT_NEEDED, DT_RPATH, DT_RUNPATH = 1, 15, 29
STB_LOCAL = 0


class Version(NamedTuple):
    """A symbol version that a needed library must have."""

    library: str
    version: str


class Symbol(NamedTuple):
    name: str
    defined: bool


class Section(NamedTuple):
    type: int
    data: bytes
    link: int


class Elf:
    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a little-endian 64-bit ELF file")
        (self.machine,) = struct.unpack_from("<H", data, 18)
        offset, size, count = struct.unpack_from("<40xQ10xHH", data)
        self.sections: list[Section] = []
        for i in range(count):
            kind, at, length, link = struct.unpack_from("<4xI16xQQI", data, offset + i * size)
            self.sections.append(Section(kind, data[at : at + length] if kind != 8 else b"", link))

    def _section(self, kind: int) -> Section | None:
        return next((s for s in self.sections if s.type == kind), None)

    def _text(self, section: Section, offset: int) -> str:
        strings = self.sections[section.link].data
        return strings[offset : strings.index(b"\0", offset)].decode()

    def dynamic(self, tag: int) -> list[str]:
        """Returns the strings of a tag in the dynamic section."""
        section = self._section(SHT_DYNAMIC)
        if section is None:
            return []
        return [self._text(section, value) for key, value in struct.iter_unpack("<qQ", section.data) if key == tag]

    def needed(self) -> list[str]:
        """Returns the libraries that the loader must find."""
        return self.dynamic(DT_NEEDED)

    def needed_versions(self) -> list[Version]:
        section = self._section(SHT_GNU_VERNEED)
        found: set[Version] = set()
        at = 0
        while section is not None:
            count, file, aux, following = struct.unpack_from("<2xHIII", section.data, at)
            here = at + aux
            for _ in range(count):
                name, step = struct.unpack_from("<8xII", section.data, here)
                found.add(Version(self._text(section, file), self._text(section, name)))
                here += step
            if following == 0:
                break
            at += following
        return sorted(found)

    def symbols(self) -> list[Symbol]:
        """Returns the global dynamic symbols."""
        section = self._section(SHT_DYNSYM)
        if section is None:
            return []
        rows = struct.iter_unpack("<IBxH16x", section.data)
        return [Symbol(self._text(section, name), where != 0) for name, info, where in rows if info >> 4 != STB_LOCAL]

    def exports(self) -> list[str]:
        return sorted(s.name for s in self.symbols() if s.defined)
