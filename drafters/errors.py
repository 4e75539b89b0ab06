"""The one exception of this room: a mistake in a configuration, a tensor's shape or a checkpoint, said in words."""


class DrafterError(Exception):
    """Something about a drafter or its input is wrong; the message says what, where and what to do."""
