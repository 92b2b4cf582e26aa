"""The micro-batch executor: a batch in pieces whose collectives hide behind the other pieces' compute."""

from tpoverlap.microbatch.batch import Batch, TokenPiece
from tpoverlap.microbatch.engine_features import EngineFeatures, check_supported
from tpoverlap.microbatch.executor import MicroBatchExecutor
from tpoverlap.microbatch.split import balance_position, split_tokens
from tpoverlap.microbatch.stats import Interval, RunStats

__all__ = [
    "Batch",
    "EngineFeatures",
    "Interval",
    "MicroBatchExecutor",
    "RunStats",
    "TokenPiece",
    "balance_position",
    "check_supported",
    "split_tokens",
]
