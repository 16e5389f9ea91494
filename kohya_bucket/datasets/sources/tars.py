"""Images in tar shards on this machine, read at random by means of an index."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.checks import as_flag
from kohya_bucket.datasets.captions import caption_of_file
from kohya_bucket.datasets.sources.columns import cell_picture, explained
from kohya_bucket.datasets.sources.protocol import SourceSizes
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.formats import UnreadableImageError, explain_os_error
from kohya_bucket.images.pixels import Fit, Picture
from kohya_bucket.images.stamps import read_unchanged
from kohya_bucket.images.tar_index import TarIndex

__all__ = ["TarSource"]


class TarSource:
    """The samples of a `TarIndex`. Nothing is unpacked, and no file stays open between samples.

    Raises:
        KohyaBucketError: a shard has changed since it was indexed, or images are to be turned and it is unknown how.
    """

    def __init__(self, index: TarIndex, *, obey_exif: bool = False) -> None:
        if not index.is_current():
            raise KohyaBucketError("a shard has changed or gone since it was indexed: build the index again")
        if as_flag("obey_exif", obey_exif) and not index.rows["orientation"].all():
            raise KohyaBucketError(
                "obey_exif is set, but an index of webshart does not say how images are turned: name the tar files"
            )
        self.index = index
        self._obey_exif = as_flag("obey_exif", obey_exif)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def shards(self) -> npt.NDArray[np.int32]:
        """[N] number of the shard that each image lies in."""
        return np.ascontiguousarray(self.index.rows["shard"])

    def read_sizes(self) -> SourceSizes:
        sizes = self.index.sizes
        if self._obey_exif:
            sizes = np.where((self.index.rows["orientation"] >= 5)[:, None], sizes[:, ::-1], sizes)
        failures = [(i, self.name(i), reason) for i, reason in sorted(self.index.reasons.items())]
        return SourceSizes(sizes, failures)

    def pixels(self, index: int) -> npt.NDArray[np.uint8]:
        return self.picture(index).pixels

    def picture(self, index: int, fit: Fit | None = None) -> Picture:
        row = self.index.rows[index]
        try:
            return cell_picture(self._bytes(row, row["offset"], row["length"]), self._obey_exif, fit)
        except UnreadableImageError as error:
            raise explained(self.name(index), error) from error

    def caption(self, index: int) -> str:
        row = self.index.rows[index]
        if not row["caption_length"]:
            return ""
        name = f"{self.name(index)}.{self.index.caption}"
        return caption_of_file(self._bytes(row, row["caption_offset"], row["caption_length"]), name)

    def name(self, index: int) -> str:
        return self.index.name(index)

    def _bytes(self, row: Any, offset: Any, length: Any) -> bytes:
        number = int(row["shard"])
        shard = self.index.shards[number]
        try:
            return read_unchanged(shard, self.index.stamps[number], int(offset), int(length))
        except OSError as error:
            raise KohyaBucketError(f"{shard}: this shard cannot be read ({explain_os_error(error)})") from error
