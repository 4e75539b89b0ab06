"""What can be wrong with a corpus. Every message says what, where and what to do."""


class CorpusError(Exception):
    """Base of all errors of this room; pipelines print it as one line and exit with code 2."""


class RowRejected(CorpusError):
    """One row cannot be used. `reason` is the short name under which summaries count it, `detail` is for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class TemplateRefused(RowRejected):
    """The chat template itself raised on these messages, for instance because roles do not alternate."""


class MaskRefused(RowRejected):
    """No trustworthy loss mask can be made for this conversation with this template."""
