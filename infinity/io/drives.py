"""The drive of a directory, and reasons why a measurement in it may not show the drive's performance."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_ELSEWHERE = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "lustre", "glusterfs", "beegfs", "afs"}
)
_TRANSFORMING = frozenset({"btrfs", "zfs", "bcachefs", "overlay"})
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Drive:
    """The place of a directory.

    Attributes:
        filesystem: its type, such as ext4.
        device: the block device, such as nvme0n1p1; empty if there is none, as with a network filesystem.
        number: device number of `stat`; equal for directories on one device.
    """

    filesystem: str
    device: str
    number: int


def drive_of(path: Path) -> Drive:
    """Return the drive that `path` is on."""
    number = path.stat().st_dev
    link = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    return Drive(filesystem_of(path), link.resolve().name if link.exists() else "", number)


def filesystem_of(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the type of the filesystem that `path` is on."""
    best = ("", "unknown")
    resolved = str(path.resolve())
    for line in mounts.read_bytes().splitlines():
        _, escaped, kind, *_ = os.fsdecode(line).split(" ")
        mount = _ESCAPED.sub(lambda found: chr(int(found[1], 8)), escaped)  # a blank in a name is \040
        inside = mount == "/" or resolved == mount or resolved.startswith(f"{mount}/")
        if inside and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1]


def cautions(drive: Drive, *, direct: bool) -> list[str]:
    """Return the reasons why the numbers may not be the drive's; empty if none is known."""
    found = []
    if drive.filesystem in _MEMORY:
        found.append(f"{drive.filesystem} lies in memory: this is not the speed of a drive, and its files use memory")
    elif not direct:
        found.append("no direct I/O: this is the page cache, and written data may not be on the drive yet")
    if drive.filesystem in _ELSEWHERE or drive.filesystem.startswith("fuse"):
        found.append(f"{drive.filesystem}: the server and this machine's client may cache the data")
    if drive.filesystem in _TRANSFORMING:
        found.append(f"{drive.filesystem}: it may copy, compress or checksum the data, also with direct I/O")
    if drive.device.startswith(("vd", "xvd", "zram", "ram", "loop")):
        what = "a virtual disk: its host" if drive.device.startswith(("vd", "xvd")) else f"{drive.device}: it"
        found.append(f"{what} may cache, so compare ratios rather than trust the rates")
    return found
