"""Reads a shared library's exports, libraries and symbol versions, and writes its pointers once.

A reader of little-endian ELF64 with what an audit of a wheel needs and nothing
else. It reads the section headers, which every linker writes and `-s` keeps.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

SHT_STRTAB, SHT_RELA, SHT_DYNAMIC, SHT_DYNSYM, SHT_GNU_VERNEED, SHT_GNU_VERSYM = 3, 4, 6, 11, 0x6FFFFFFE, 0x6FFFFFFF
DT_NEEDED, DT_SONAME, DT_RPATH, DT_RUNPATH = 1, 14, 15, 29
STB_LOCAL = 0
RELATIVE = {62: 8, 183: 1027}  # by machine, x86-64 and aarch64: the relocation that adds where a library is loaded


class Version(NamedTuple):
    """A symbol version that one needed library must have."""

    library: str
    version: str


class Symbol(NamedTuple):
    name: str
    defined: bool
    version: str  # "" when unversioned


class Section(NamedTuple):
    type: int
    address: int
    offset: int  # in the file
    data: bytes
    link: int
    entry: int


class Elf:
    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a little-endian 64-bit ELF file")
        (self.machine,) = struct.unpack_from("<H", data, 18)
        offset, size, count = struct.unpack_from("<40xQ10xHH", data)
        self.sections: list[Section] = []
        for i in range(count):
            kind, address, at, length, link, entry = struct.unpack_from("<4xI8xQQQI12xQ", data, offset + i * size)
            self.sections.append(Section(kind, address, at, data[at : at + length] if kind != 8 else b"", link, entry))

    def _section(self, kind: int) -> Section | None:
        return next((s for s in self.sections if s.type == kind), None)

    def _text(self, section: Section, offset: int) -> str:
        strings = self.sections[section.link].data
        return strings[offset : strings.index(b"\0", offset)].decode()

    def dynamic(self, tag: int) -> list[str]:
        """The texts of a tag of the dynamic section."""
        section = self._section(SHT_DYNAMIC)
        if section is None:
            return []
        return [self._text(section, value) for key, value in struct.iter_unpack("<qQ", section.data) if key == tag]

    def needed(self) -> list[str]:
        """The libraries that the loader must find."""
        return self.dynamic(DT_NEEDED)

    def _versions(self) -> dict[int, Version]:
        section = self._section(SHT_GNU_VERNEED)
        found: dict[int, Version] = {}
        at = 0
        while section is not None:
            count, file, aux, following = struct.unpack_from("<2xHIII", section.data, at)
            here = at + aux
            for _ in range(count):
                other, name, step = struct.unpack_from("<6xHII", section.data, here)
                found[other & 0x7FFF] = Version(self._text(section, file), self._text(section, name))
                here += step
            if following == 0:
                break
            at += following
        return found

    def needed_versions(self) -> list[Version]:
        return sorted(set(self._versions().values()))

    def symbols(self) -> list[Symbol]:
        """The global dynamic symbols."""
        section, versym = self._section(SHT_DYNSYM), self._section(SHT_GNU_VERSYM)
        if section is None:
            return []
        versions = self._versions()
        numbers = struct.unpack(f"<{len(versym.data) // 2}H", versym.data) if versym else ()
        out = []
        for i, (name, info, where) in enumerate(struct.iter_unpack("<IBxH16x", section.data)):
            if i and info >> 4 != STB_LOCAL:
                version = versions.get(numbers[i] & 0x7FFF) if numbers else None
                out.append(Symbol(self._text(section, name), where != 0, version.version if version else ""))
        return out

    def exports(self) -> list[str]:
        return sorted(s.name for s in self.symbols() if s.defined)


def pointers_once(data: bytes) -> bytes:
    """Return a library that loads as before and compresses better. Linkers write a pointer into
    its relocation, where loaders read it, and again into the word that the relocation sets: these
    words become zero. Relocations are sorted by the pointer, in windows of 256 KiB of words, which
    stay in a core's cache while they are set; loaders take any order."""
    elf, out = Elf(data), bytearray(data)
    table = next(s for s in elf.sections if s.type == SHT_RELA)
    relative = RELATIVE[elf.machine]
    entries = list(struct.iter_unpack("<QQQ", table.data))  # address of the word, type, pointer
    # Relative ones stay in front, where the dynamic section counts them; the order of others is kept.
    entries.sort(key=lambda e: (0, e[0] >> 18, e[2], e[0]) if e[1] == relative else (1, 0, 0, 0))
    struct.pack_into(f"<{3 * len(entries)}Q", out, table.offset, *(number for entry in entries for number in entry))
    for section in elf.sections:
        for address, kind, _ in entries:
            if kind == relative and section.address <= address < section.address + len(section.data):
                struct.pack_into("<Q", out, section.offset + address - section.address, 0)
    return bytes(out)
