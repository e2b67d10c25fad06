"""Zip archives whose list of members is whole."""

import os
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

END = b"PK\5\6"  # begins the record at the end of an archive
LONGEST = 22 + 0xFFFF  # bytes of that record, with its comment
NAME_LENGTH, NAME = 26, 30  # where they are in front of a member
UTF_8 = 0x800  # the flag of a name that is not in the old code of zip archives
UNKNOWN = 0xFFFF  # the number of members where they are too many for two bytes


@contextmanager
def open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an archive for reading; raise BadZipFile if its list of members is damaged.

    Python does not compare the length of the list with the number of members in the record at the end: a damaged byte
    can make one entry of the list swallow the next. Nor does it compare a name in the list with the one in front of the
    member, unless the member is read: under a damaged name nobody would want it.
    """
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST))
        tail = file.read()
        (count,) = struct.unpack_from("<H", tail, tail.rfind(END) + 10)
        if count not in (UNKNOWN, len(archive.infolist()) & 0xFFFF):
            raise zipfile.BadZipFile(f"its list has {len(archive.infolist())} files, not {count}")
        for member in archive.infolist():
            file.seek(member.header_offset + NAME_LENGTH)
            if len(found := file.read(2)) < 2:
                raise zipfile.BadZipFile(f"{member.orig_filename!r} begins behind its end")
            (length,) = struct.unpack("<H", found)
            file.seek(member.header_offset + NAME)
            if file.read(length).decode("utf-8" if member.flag_bits & UTF_8 else "cp437") != member.orig_filename:
                raise zipfile.BadZipFile(f"the name {member.orig_filename!r} in its list is damaged")
        yield archive
