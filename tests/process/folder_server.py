"""A FUSE server of one folder: `python folder_server.py FOLDER MOUNTPOINT`. SIGSTOP makes it one that is gone."""

from __future__ import annotations

import os
import sys

import mfusepy  # type: ignore[import-untyped]

SHOWN = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_atime", "st_mtime", "st_ctime")


class Folder(mfusepy.Operations):
    """Each call as the folder's own file system answers it."""

    use_ns = True

    def __init__(self, root):
        self._root = root

    def _at(self, path):
        return self._root + path

    def getattr(self, path, fh=None):
        found = os.lstat(self._at(path))
        return {name: getattr(found, name) for name in SHOWN}

    def readlink(self, path):
        return os.readlink(self._at(path))

    def readdir(self, path, fh):
        return [".", "..", *os.listdir(self._at(path))]

    def open(self, path, flags):
        return os.open(self._at(path), flags)

    def create(self, path, mode, fi=None):
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT, mode)

    def read(self, path, size, offset, fh):
        return os.pread(fh, size, offset)

    def write(self, path, data, offset, fh):
        return os.pwrite(fh, data, offset)

    def truncate(self, path, length, fh=None):
        os.truncate(self._at(path), length)

    def release(self, path, fh):
        os.close(fh)

    def mkdir(self, path, mode):
        os.mkdir(self._at(path), mode)

    def rmdir(self, path):
        os.rmdir(self._at(path))

    def unlink(self, path):
        os.unlink(self._at(path))

    def rename(self, old, new):
        os.rename(self._at(old), self._at(new))

    def chmod(self, path, mode):
        os.chmod(self._at(path), mode)


if __name__ == "__main__":
    mfusepy.FUSE(Folder(sys.argv[1]), sys.argv[2], foreground=True, nothreads=True)
