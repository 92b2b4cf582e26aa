"""Every exception that tpoverlap raises on purpose.

Messages say what was asked, what is supported and what to do. Plain argument mistakes (wrong shape, wrong dtype) are
``ValueError`` and ``TypeError`` where no class below says more.
"""

from __future__ import annotations


class TpOverlapError(RuntimeError):
    """Base of all errors of this package."""


class PeerLostError(TpOverlapError):
    """A rank of the group has died. Permanent: the group cannot be reset, only destroyed."""


class CollectiveTimeoutError(TpOverlapError):
    """A peer did not arrive within ``timeout_s`` of this rank's own publish."""


class CollectiveAbortedError(TpOverlapError):
    """A rank called ``abort``, or an exception on a rank ended the collective for all."""


class CollectiveMismatchError(TpOverlapError):
    """The ranks called different operations, dtypes, sizes or modes at the same point."""


class PieceMismatchError(TpOverlapError):
    """The pieces of one batch made different numbers of collectives."""


class ChannelError(TpOverlapError):
    """The host-memory channel could not be opened or was used against its rules.

    reason: the stable word under which a coordinator lists it among its rejection reasons.
    """

    def __init__(self, message: str, reason: str = "channel_failed") -> None:
        super().__init__(message)
        self.reason = reason


class ConfigError(TpOverlapError, ValueError):
    """A configuration field has a value that is not supported."""


class UnsupportedError(TpOverlapError, NotImplementedError):
    """What was asked is well formed but not supported."""
