"""What can go wrong in the target cache. Messages say what, where and what to do; pipelines print them as they are."""


class StorageError(Exception):
    """Base of every error that storage raises on purpose."""


class ContractMismatch(StorageError):
    """Two stages disagree on the target or on how it was captured; the message names every differing field."""


class CorruptShard(StorageError):
    """Bytes in the cache are not what was written; the message names shard, row and cause."""


class StorageUnavailable(StorageError):
    """The object store cannot be reached, or refuses us: endpoint, credentials, bucket, permissions, full disk."""


class AlreadyCommitted(StorageError):
    """Another producer's result for the same rows was committed before; that one stands."""
