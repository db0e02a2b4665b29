"""Parts of predictions: the blocks that one rank writes. They are verified before an interrupted job continues with
them.

::

    rank-00003.h5        HDF5 file of rank 3: its box of every sample
    rank-00003.progress  number of batches on the disk, and the checksum of them and of the file's structure

The structure of the HDF5 file is complete before the first batch; after that, HDF5 is not used. Batches are written at
their offsets, and the progress is replaced (:func:`halograd.documents.replacing`) after the data are on the disk. The
progress is a file of checksums, like a checkpoint (:mod:`halograd.training.chunk_file`).

A part is continued if its bytes match the checksum. Otherwise the part starts again as a new file. The old target of
the name (a link, a pipe, a file with a second name) is neither written nor followed.
"""

from __future__ import annotations

import json
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import h5py
import numpy as np

from halograd import schema
from halograd.documents import parse_json, replacing, writing
from halograd.errors import UserError

from ..data.disk import DataError, atomic_path
from ..dtensor import Box
from .chunk_file import CHUNK, ChunkWriter, DamagedFile, OtherFile, VerifiedFile

__all__ = ["PartArray", "PartFile", "part_path"]

#: Age of the progress at which it is recorded again [s]: a killed rank loses at most this time and one batch.
RECORD_SECONDS = 2.0


@dataclass(frozen=True)
class PartArray:
    """Array of a part: this rank's box of each batch, one batch after another.

    Attributes
    ----------
    name
        Name of the dataset.
    box
        Box ``(N, *spatial, C)`` of this rank, in the coordinates of a batch.
    dtype
        Dtype in the file.
    """

    name: str
    box: Box
    dtype: np.dtype

    @property
    def row(self) -> int:
        """Size of this rank's box of a sample [B]."""
        return int(np.prod(self.box.shape[1:])) * self.dtype.itemsize


@dataclass(frozen=True)
class PartRecord:
    """Record, in the file of a rank, of the batches that are on the disk.

    Attributes
    ----------
    job, rank
        Key of the job, and the rank.
    size
        Size of the HDF5 file [B].
    offsets
        Offset of each array in the HDF5 file [B].
    batches
        Number of complete batches.
    checksum
        CRC-32 of all bytes outside the arrays, followed by the batches in order.
    """

    __pydantic_config__ = schema.STRICT

    job: schema.Text
    rank: schema.Whole
    size: schema.Bytes
    offsets: tuple[schema.Bytes, ...]
    batches: schema.Whole
    checksum: schema.Bytes


class PartFile:
    """File of one rank, open to write batches in order. Local.

    Parameters
    ----------
    path
        The file; its folder is created if it is missing.
    rank
        Rank of this process.
    arrays
        Arrays of this rank, none of them empty.
    count, batch
        Number of all samples, and number of samples of a batch.
    job
        Text that distinguishes this job from others.
    describe
        Function that is called with the new file, to complete its structure.

    Attributes
    ----------
    done
        Number of batches in the part.
    fault
        Reason why an earlier attempt at this part is not continued; None if it is continued, or if there was no
        attempt.

    Raises
    ------
    DataError
        If the files cannot be written; also raised by `write` and `record`.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        arrays: Sequence[PartArray],
        count: int,
        batch: int,
        job: str,
        describe: Callable[[h5py.File], None] = lambda file: None,
    ) -> None:
        self.path, self._record = path, path.with_suffix(".progress")
        self._job, self._rank, self._count, self._batch = job, rank, count, batch
        self._arrays = list(arrays)
        self.done, self._recorded, self._at = 0, 0, time.monotonic()
        self.fault: str | None = None
        self._file = -1
        try:
            with writing(str(path), kind=DataError):
                for folder in (path.parent.parent, path.parent):  # through links, parts of other jobs would be replaced
                    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
                        raise DataError(
                            f"cannot write {folder}: expected a folder, got a file or a link; remove it, or give "
                            "another path"
                        )
                path.parent.mkdir(parents=True, exist_ok=True)
                if not self._continue():
                    self._begin(describe)
        except BaseException:
            self.close()
            raise

    # -- opening ---------------------------------------------------------------------------------

    def _continue(self) -> bool:
        """Open and verify the part of an earlier attempt; return whether this job continues it."""
        try:
            record = self._progress()
            if record is None:
                return False
            # Neither follows a link nor waits for the other end of a pipe.
            self._file = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            self._verify(record)
            return True
        except DamagedFile as error:
            self.fault = str(error)
        except OSError as error:
            self.fault = f"it cannot be opened ({error.strerror})"
        self.close()
        return False

    def _progress(self) -> PartRecord | None:
        """Return the record of an earlier attempt; None if there was none."""
        try:
            # `lstat`: a link may lead to a file of another job or program.
            if not stat.S_ISREG(os.lstat(self._record).st_mode):
                raise DamagedFile("its progress is a link, a folder or a pipe")
        except FileNotFoundError:
            if os.path.lexists(self.path):
                raise DamagedFile("there is no record of its progress") from None
            return None
        try:
            with closing(VerifiedFile(self._record)) as file:
                return schema.build(PartRecord, parse_json(file.index().decode(), "record"), "record")
        except (DamagedFile, OtherFile, UserError, UnicodeDecodeError) as error:
            raise DamagedFile(f"its progress is damaged ({str(error).partition(';')[0]})") from error

    def _verify(self, record: PartRecord) -> None:
        """Read the part, and raise DamagedFile unless its bytes match the record."""
        status = os.fstat(self._file)
        # A file with a second name may be that of another program, which writes would change.
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise DamagedFile("it is no regular file of one name")
        if (record.job, record.rank) != (self._job, self._rank):
            raise DamagedFile("its progress is of another job or rank")
        if status.st_size != record.size:
            raise DamagedFile(f"expected {record.size} bytes, got {status.st_size}")
        # More batches than the samples of this job fill, rounded up, are those of other data.
        if len(record.offsets) != len(self._arrays) or record.batches * self._batch >= self._count + self._batch:
            raise DamagedFile("its progress does not fit the job")
        self._offsets, self._size = record.offsets, record.size
        self._sums = [self._structure()]  # checksums of the first batches, by their number
        for number in range(record.batches):
            checksum = self._sums[-1]
            for array, offset, (low, high) in zip(self._arrays, self._offsets, self._rows(number)):
                checksum = self._sum(offset + low * array.row, offset + high * array.row, checksum)
            self._sums.append(checksum)
        if self._sums[-1] != record.checksum:
            raise DamagedFile(f"the checksum of its structure and of {record.batches} batches is wrong")
        self.done = self._recorded = record.batches

    def _begin(self, describe: Callable[[h5py.File], None]) -> None:
        """Create the file with all HDF5 metadata; it appears under its name when it is complete."""
        for path in (self.path, self._record):
            if path.is_dir() and not path.is_symlink():
                raise DataError(f"cannot write {path}: expected a file, got a folder; remove it, or give another path")
        self._record.unlink(missing_ok=True)  # this record would belong to another file
        placed = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        # Offsets exist before any data, and HDF5 writes no fill values: the batches cover all elements.
        placed.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        placed.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        with atomic_path(self.path) as partial:
            with h5py.File(partial, "w", locking=False) as file:
                datasets = [
                    file.create_dataset(array.name, (self._count, *array.box.shape[1:]), array.dtype, dcpl=placed)
                    for array in self._arrays
                ]
                describe(file)
                file.flush()
                self._offsets = tuple(dataset.id.get_offset() for dataset in datasets)
            # The descriptor stays valid when the file gets its name.
            self._file = os.open(partial, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._size = os.fstat(self._file).st_size
        try:
            self._sums = [self._structure()]
        except DamagedFile as error:
            raise DataError(
                f"cannot write {self.path}: expected the new file as it was written, got an error ({error}); check the "
                "disk, or give another path"
            ) from error

    def _rows(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield, for each array, the range of the file's samples that belong to batch `number`."""
        first = number * self._batch
        for array in self._arrays:
            low, high = array.box.ranges[0]
            yield min(first + low, self._count), min(first + high, self._count)

    def _structure(self) -> int:
        """Return the checksum of all bytes outside the arrays."""
        checksum, start = 0, 0
        for offset, array in sorted(zip(self._offsets, self._arrays), key=lambda pair: pair[0]):
            # The bytes between two arrays: metadata, and gaps.
            checksum = self._sum(start, offset, checksum)
            start = offset + self._count * array.row
        return self._sum(start, self._size, checksum)

    def _sum(self, start: int, stop: int, checksum: int) -> int:
        """Continue a checksum with the bytes from `start` to `stop`."""
        # In pieces, because a part may be larger than the memory.
        while start < stop:
            try:
                data = os.pread(self._file, min(CHUNK, stop - start), start)
            except OSError as error:
                raise DamagedFile(f"its bytes from {start} cannot be read ({error.strerror})") from error
            if not data:
                raise DamagedFile(f"it ends at byte {start}")
            checksum, start = zlib.crc32(data, checksum), start + len(data)
        return checksum

    # -- writing ---------------------------------------------------------------------------------

    def go_back(self, done: int) -> None:
        """Continue after the first `done` batches; the part must contain them."""
        # The record on the disk may be ahead: the same job writes the same bytes again, else its checksum is wrong.
        del self._sums[done + 1 :]
        self.done = done

    def write(self, blocks: Sequence[np.ndarray]) -> None:
        """Write the next batch: host arrays ``(N, *spatial, C)`` in the order of `arrays`.

        Samples beyond the last one are not written.
        """
        # The checksum continues that of the batches before.
        checksum = self._sums[self.done]
        with writing(str(self.path), kind=DataError):
            for array, offset, block, (low, high) in zip(self._arrays, self._offsets, blocks, self._rows(self.done)):
                data = np.ascontiguousarray(block[: high - low], array.dtype).reshape(-1).view(np.uint8).data
                position = offset + low * array.row
                start = 0
                # `pwrite` may write fewer bytes than requested.
                while start < len(data):
                    start += os.pwrite(self._file, data[start : start + CHUNK], position + start)
                checksum = zlib.crc32(data, checksum)
            self._sums.append(checksum)
            self.done += 1
            if time.monotonic() - self._at >= RECORD_SECONDS:
                self.record()

    def record(self) -> None:
        """Record the progress after the batches are on the disk; no-op if it is recorded already.

        Raises
        ------
        DataError
            If the file cannot be written, or if a second job of the same kind has replaced it by a new one.
        """
        if self.done == self._recorded:
            return
        with writing(str(self.path), kind=DataError):
            # Before the record: after a power failure it must not count batches that are not on the disk.
            os.fsync(self._file)
            if not os.path.samestat(os.fstat(self._file), os.lstat(self.path)):
                raise DataError(
                    f"cannot write {self.path}: expected the file of this job, got that of another job; wait "
                    "for that job, or give another path"
                )
            now = PartRecord(self._job, self._rank, self._size, self._offsets, self.done, self._sums[self.done])
            with replacing(self._record) as partial, ChunkWriter(partial) as raw:
                raw.finish(json.dumps(asdict(now)).encode())
        self._recorded, self._at = self.done, time.monotonic()

    def close(self) -> None:
        """Close the file without recording further batches. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> PartFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def part_path(folder: Path, rank: int) -> Path:
    """Return the path of the part of a rank.

    >>> part_path(Path("out.h5.parts/3f2a90c1"), 3).as_posix()
    'out.h5.parts/3f2a90c1/rank-00003.h5'
    """
    return folder / f"rank-{rank:05d}.h5"
