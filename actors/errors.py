"""The one base class of what the actors refuse."""


class ActorError(Exception):
    """Something a person can mend: says what is wrong, where, and what to do."""
