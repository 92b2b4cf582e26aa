"""The decoder: token ids in, hidden states out, as one tensor-parallel rank computes it.

Tensor parallelism as in Megatron-LM (Shoeybi et al. 2019): column-parallel QKV and gate/up projections, row-parallel
output and down projections followed by an all-reduce, so that every rank holds the same hidden states between layers.
The embedding table is whole on each rank, because a lookup costs less than the all-reduce that would replace it; the
output projection is cut along the vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from tpoverlap.microbatch.batch import Batch
from tpoverlap.model.config import DecoderConfig
from tpoverlap.model.layers import Attention, DecoderLayer, Group, RMSNorm, is_as_made, norm_of_sum
from tpoverlap.model.metadata import AttentionMetadata, StateSlots
from tpoverlap.model.sharding import RangeShard
from tpoverlap.model.token_mixer import TokenMixer, blocks_per_state


class Decoder(nn.Module):
    """One rank's part of a dense decoder; :func:`tpoverlap.model.checkpoint.load_decoder` makes it.

    Between calls it keeps nothing but the paged key/value cache, so pieces of one batch may run interleaved. The
    methods that say so are collectives: all ranks call them with the same arguments.
    """

    def __init__(
        self,
        config: DecoderConfig,
        group: Group | None,
        embedding: torch.Tensor,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        lm_head: torch.Tensor,
        vocab: RangeShard,
    ) -> None:
        """embedding: [vocabulary, hidden]. lm_head: its rows ``vocab.start`` to ``vocab.stop``, unpadded."""
        super().__init__()
        self.config = config
        self.group = group
        self.vocab = vocab
        self.register_buffer("embedding", embedding)
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.register_buffer("lm_head", lm_head)
        inv_freq = torch.tensor(config.rope_inv_freq, dtype=torch.float32, device=embedding.device)
        self.register_buffer("rope_inv_freq", inv_freq)
        mixers = [module for module in self.modules() if isinstance(module, TokenMixer)]
        self.state_block = mixers[0].state_block if mixers else None
        self._blocks_per_state = 0

    embedding: torch.Tensor
    lm_head: torch.Tensor
    rope_inv_freq: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and of the key/value cache."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """Gives each layer a zeroed cache of ``num_blocks`` blocks of ``block_size`` tokens for this rank's KV heads.

        A cache that was there before is dropped. Layers with a recurrent state get a slot for it for every
        ``state_block`` tokens: block tables then hold whole runs of ``state_block`` / ``block_size`` blocks that begin
        at a multiple of that number, so that a run's number is also that of its slot.

        Errors: ConfigError unless ``state_block`` is a multiple of ``block_size``, and the blocks are whole runs.
        """
        if self.state_block is not None:
            self._blocks_per_state = blocks_per_state(self.state_block, num_blocks, block_size)
        for module in self.modules():
            if isinstance(module, Attention):
                module.allocate_kv_cache(num_blocks, block_size, self.dtype, self.device)
            elif isinstance(module, TokenMixer):
                module.allocate_states(num_blocks // self._blocks_per_state, self.device)

    def metadata(self, batch: Batch) -> AttentionMetadata:
        """What :meth:`forward` derives from ``batch``; a caller that captures a CUDA graph makes it before."""
        metadata = AttentionMetadata.of(batch)
        if self.state_block is None:
            return metadata
        slots = StateSlots.of(metadata, self.state_block, self._blocks_per_state)
        return replace(metadata, state_slots=slots)

    @torch.inference_mode()
    def forward(self, batch: Batch, metadata: AttentionMetadata | None = None) -> torch.Tensor:
        """Runs the packed requests of ``batch``, whose tensors are on the model's device. A collective.

        Their keys and values go to the cache. Returns the hidden states after the last norm, [tokens, hidden] in the
        model's dtype, with the same bits on every rank. Padding tokens are computed too; their rows mean nothing.
        metadata: of this batch, where it has been made already.

        Errors: ValueError for M-RoPE positions, RuntimeError without a cache.
        """
        if batch.positions.dim() != 1:
            raise ValueError(
                f"positions must be [tokens], got {tuple(batch.positions.shape)}: no model here has M-RoPE"
            )
        if batch.input_ids is not None:
            hidden = F.embedding(batch.input_ids, self.embedding)
        else:
            assert batch.inputs_embeds is not None  # Batch's own invariant
            hidden = batch.inputs_embeds
        angles = batch.positions.float()[:, None] * self.rope_inv_freq
        rotary = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        metadata = metadata or self.metadata(batch)
        update: torch.Tensor | None = None
        for layer in self.layers:
            if isinstance(layer, DecoderLayer) and is_as_made(layer, DecoderLayer):
                hidden, update = layer.without_last_sum(hidden, update, rotary, metadata)
            else:
                hidden, update = layer(hidden if update is None else hidden + update, rotary, metadata), None
        return self.norm(hidden) if update is None else norm_of_sum(self.norm, hidden, update)[1]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocabulary] in the model's dtype, with the same bits on every rank. A collective."""
        logits = self._padded_shard_logits(hidden, padding=0.0)
        if self.group is not None:
            logits = self.group.all_gather(logits, -1)
        return logits[:, : self.config.vocab_size]

    @torch.inference_mode()
    def shard_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's columns of :meth:`logits`: [rows, hidden] -> [rows, vocab.stop - vocab.start]. No collective."""
        return F.linear(hidden, self.lm_head)

    @torch.inference_mode()
    def token_losses(self, hidden: torch.Tensor, targets: torch.Tensor, *, block: int = 256) -> torch.Tensor:
        """Negative log-likelihood, in nats, of each row's target. A collective.

        hidden [rows, hidden]; targets int64 [rows], ids of the vocabulary. Returns float32 [rows], with the same bits
        on every rank. No rank holds more than ``block`` rows of logits, and those of its own vocabulary shard only:
        ranks exchange two numbers a row, the shard's log-sum-exp and the target's logit where the shard has it (the
        vocabulary-parallel cross entropy of Megatron-LM).
        """
        losses = [
            self._block_losses(rows, ids) for rows, ids in zip(hidden.split(block), targets.split(block), strict=True)
        ]
        return torch.cat(losses)

    def _block_losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self._padded_shard_logits(hidden, padding=float("-inf")).float()
        index = targets - self.vocab.start
        in_shard = (index >= 0) & (index < self.lm_head.shape[0])
        target_logits = logits.gather(1, index.clamp(0, self.vocab.size - 1)[:, None])[:, 0]
        parts = torch.stack([logits.logsumexp(1), target_logits.where(in_shard, 0.0)])[None]
        if self.group is not None:
            parts = self.group.all_gather(parts, 0)
        return parts[:, 0].logsumexp(0) - parts[:, 1].sum(0)

    def _padded_shard_logits(self, hidden: torch.Tensor, *, padding: float) -> torch.Tensor:
        return F.pad(self.shard_logits(hidden), (0, self.vocab.size - self.lm_head.shape[0]), value=padding)
