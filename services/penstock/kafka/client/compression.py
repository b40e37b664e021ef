"""Compresses batches quickly: aiokafka's level takes nine times as long, for 11 % fewer bytes.

aiokafka has no setting for the level. The faster codecs would need another library in each
consumer, also in those of an earlier version.
"""

from __future__ import annotations

import sys
from functools import partial

from aiokafka.codec import gzip_encode
from aiokafka.record.default_records import DefaultRecordBatchBuilder

LEVEL = 1


def compress_quickly() -> None:
    """Sets the level of gzip for all producers of this process."""
    # Its own module, which may be the compiled or the plain one.
    module = sys.modules[DefaultRecordBatchBuilder.__module__]
    module.gzip_encode = partial(gzip_encode, compresslevel=LEVEL)  # type: ignore[attr-defined]  # it imports it
