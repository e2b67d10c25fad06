"""Zip archives whose list of members is whole."""

import os
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

END = b"PK\5\6"  # begins the record at the end of an archive
LONGEST = 22 + 0xFFFF  # bytes of that record, with its comment
UNKNOWN = 0xFFFF  # the number of members where they are too many for two bytes


@contextmanager
def open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an archive for reading; raise BadZipFile if members are missing from its list.

    Python does not compare the length of the list with the number of members in the record at the end. A damaged byte
    can make one entry of the list swallow the next, and the archive would be read without that member.
    """
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST))
        tail = file.read()
        (count,) = struct.unpack_from("<H", tail, tail.rfind(END) + 10)
        if count not in (UNKNOWN, len(archive.infolist()) & 0xFFFF):
            raise zipfile.BadZipFile(f"its list has {len(archive.infolist())} files, not {count}")
        yield archive
