"""What can go wrong while decoding, said to the person who asked for it."""


class DecodingError(Exception):
    """A target, drafter, prompt or setting that cannot be decoded with; the message says what, where and what to do."""
